"""Builds the C++ half of tide. Needs torch and a C++20 compiler; with ninja it uses two cores."""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# Two jobs: more would need more memory than a small machine has beside the tests.
os.environ.setdefault("MAX_JOBS", "2")

sanitizer = os.environ.get("TIDE_SANITIZE")  # "thread": see README, "Checking tide itself"
flags = ["-O1", "-g0", "-std=c++20", "-Wall", "-Wno-unknown-pragmas", "-fvisibility=hidden"]
links = []
if sanitizer:
    flags += [f"-fsanitize={sanitizer}", "-g", "-fno-omit-frame-pointer"]
    links += [f"-fsanitize={sanitizer}"]

# Most of the work is reading torch's headers: files that read the same ones are compiled together.
TOGETHER = {
    "kernels": ("attention", "norm"),
    "tensors": ("copy", "tensor"),
    "operators": ("fallback", "flops", "traits"),
    "collectives": ("collective", "work"),
}


def sources() -> list[str]:
    folder = Path("build/together")
    folder.mkdir(parents=True, exist_ok=True)
    alone = {path.stem: path for path in sorted(Path("csrc").glob("*.cpp"))}
    found = []
    for name, members in TOGETHER.items():
        text = "".join(f'#include "{alone.pop(member).resolve()}"\n' for member in members)
        unit = folder / f"{name}.cpp"
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        found.append(str(unit))
    return found + [str(path) for path in alone.values()]


setup(
    ext_modules=[
        CppExtension(
            "tide._C",
            sources(),
            extra_compile_args=flags,
            extra_link_args=links,
            depends=[str(path) for path in sorted(Path("csrc").iterdir())],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
