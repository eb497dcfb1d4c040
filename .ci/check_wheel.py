"""Build sdist and wheel, install the wheel into an empty folder, import every module from there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"

# Run in another folder, in a fresh interpreter: the editable install must not answer.
IMPORT_ALL = """
import importlib, pkgutil, sys
from pathlib import Path
import stageline

home = Path(stageline.__file__).parent
wanted = Path(sys.argv[1]) / "stageline"
assert home == wanted, f"imported {home}, wanted {wanted}"
assert (home / "py.typed").is_file(), "py.typed is missing from the wheel"
modules = [m.name for m in pkgutil.walk_packages(stageline.__path__, "stageline.")]
for name in modules:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(f"wheel: stageline {stageline.__version__}, {len(modules) + 1} modules imported")
"""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; on failure show that and stop."""
    words = [str(part) for part in command]
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(words[:4])} ... failed:\n{done.stdout}")
    return done.stdout


def main() -> None:
    shutil.rmtree(WORK, ignore_errors=True)
    dist, installed = WORK / "dist", WORK / "installed"
    # The wheel is built from the sdist, so a file missing there is found too.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT)
    (wheel,) = dist.glob("*.whl")
    pip_install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip_install, "--target", installed, wheel)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    print(run(sys.executable, "-c", IMPORT_ALL, installed, cwd=WORK, env=environment), end="")


if __name__ == "__main__":
    main()
