"""Models from files of ONNX, computed by onnxruntime."""
