import sys
from pathlib import Path

# `python -m pytest` puts the package's own folder first on the path. After an ordinary install the
# compiled half is not there but in site-packages, and that is the tide to test.
HERE = Path(__file__).resolve().parents[1]
if not list((HERE / "tide").glob("_C*")):
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]

pytest_plugins = ["tide.testing"]
