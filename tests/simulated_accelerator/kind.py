"""Describes the simulated accelerator to inferpool. Imports no torch: the front end uses it too."""

from inferpool.models.accelerator.kinds import Accelerator

ACCELERATOR = Accelerator(
    kind="sim",
    visible="SIM_VISIBLE_DEVICES",
    management="tests.simulated_accelerator.fake_nvml",
    collectives="simccl",
    decode_jpeg="tests.simulated_accelerator.jpegs:decode_jpeg",
    transform_pictures="tests.simulated_accelerator.pictures:transform",
    fused_convolution="tests.simulated_accelerator.convolutions:fused_convolution",
    compiler="tests.simulated_accelerator.compiler:Compiler",
)
