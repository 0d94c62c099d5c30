"""Python runs this file when it starts, where its folder is on the path: every program then has software GPUs."""

from software_gpu import inside

inside.install_kernels()
