"""The Open Inference Protocol, version 2, as Triton and KServe speak it."""
