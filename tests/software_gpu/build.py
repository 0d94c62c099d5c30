"""Compiles the libraries of cpp/ for the torch of this environment, once per machine."""

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("cpp")
RUNTIME, DRIVER, KERNELS = "libsoftware_gpu.so", "libcuda.so.1", "kernels.so"
# As if these had been included: nccl.h asks for them, does without, and they need a package that torch does not bring.
UNUSED_HEADERS = ("-D__CUDA_FP16_H__", "-D__CUDA_BF16_H__", "-D__CUDA_FP8_H__")


@functools.cache
def why_not() -> str | None:
    """Why there can be no software GPU in this environment; None if there can."""
    if platform.system() != "Linux":
        return "software GPUs need Linux"
    if torch.version.cuda is None:
        return "this torch is not a CUDA build"
    if torch.__version__ < "2.14":
        return "software GPUs are built for torch 2.14 and later"
    if shutil.which("g++") is None:
        return "there is no g++ to build software GPUs with"
    for header in ("cuda_runtime_api.h", "nccl.h", "crt/host_defines.h"):
        if not any((folder / header).exists() for folder in include_folders()):
            return (
                f"no header {header}: pip install nvidia-cuda-crt, or triton, which torch's CUDA builds bring"
            )
    return None


def include_folders() -> list[Path]:
    """Where torch's own packages keep the headers of CUDA and NCCL."""
    site = Path(torch.__file__).parents[1]
    folders = [*site.glob("nvidia/cu1*/include"), *site.glob("nvidia/*/include")]
    return [*dict.fromkeys(folders), site / "triton" / "backends" / "nvidia" / "include"]


def commands() -> dict[str, list[str]]:
    """What compiles each library."""
    torch_folder = Path(torch.__file__).parent
    include = [f"-I{path}" for path in include_folders()]
    common = ["g++", "-O1", "-w", "-fPIC", "-shared", "-std=c++20"]

    def sources(*names: str) -> list[str]:
        return [str(SOURCES / f"{name}.cpp") for name in names]

    return {
        RUNTIME: [
            *common,
            *sources("device", "memory", "streams", "graphs", "nccl", "profiler"),
            *UNUSED_HEADERS,
            *include,
            "-lpthread",
        ],
        DRIVER: [*common, f"-Wl,-soname,{DRIVER}", *sources("driver")],
        KERNELS: [
            *common,
            *sources("kernels", "poison"),
            f"-I{torch_folder / 'include'}",
            f"-I{torch_folder / 'include/torch/csrc/api/include'}",
            f"-I{sysconfig.get_paths()['include']}",
            *include,
            f"-L{torch_folder / 'lib'}",
            *("-ltorch", "-ltorch_cpu", "-lc10", "-lc10_cuda"),
        ],
    }


def key() -> str:
    """Of what the libraries are made of."""
    parts = [torch.__version__, str(torch.version.git_version), torch.__file__]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir())]
    parts.append(subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@functools.cache
def built() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise-software-gpu"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key()
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = cache / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _compile(unfinished)
            unfinished.rename(folder)
    return folder


def _compile(folder: Path) -> None:
    compilers = [
        subprocess.Popen(
            [*command, "-o", str(folder / name)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, command in commands().items()
    ]
    outputs = [compiler.communicate()[0] for compiler in compilers]
    if any(compiler.returncode for compiler in compilers):
        raise RuntimeError("software GPUs do not compile:\n" + "\n".join(outputs)[-8000:])
