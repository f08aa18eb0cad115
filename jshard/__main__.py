"""`python -m jshard` is the command `jshard`."""

import sys

from jshard.cli import main
from jshard.train import launch

if __name__ == "__main__":  # data workers import the main module anew
    code = main()
    if launch.is_worker():
        launch.leave(code)
    sys.exit(code)
