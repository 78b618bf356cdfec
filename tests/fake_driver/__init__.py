"""Stand-ins for NVIDIA's driver: `libnvidia-ml.so.1` and `libcuda.so.1`, and a machine for them."""
