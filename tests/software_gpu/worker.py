"""A process with software GPUs: calls the function that launch.py names, and keeps what it returns."""

import faulthandler
import importlib
import os
import pickle
import signal
import sys
from operator import attrgetter
from pathlib import Path

from software_gpu import inside


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.pop("LD_PRELOAD", None)
    inside.install_kernels()
    folder = Path(os.environ["SOFTWARE_GPU_FOLDER"])
    module, name, args = pickle.loads((folder / "call").read_bytes())
    result = attrgetter(name)(importlib.import_module(module))(*args)
    (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(result))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # without torch's clean-up, in which threads of back ends race with the end of the interpreter


if __name__ == "__main__":
    main()
