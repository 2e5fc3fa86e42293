"""Runs one of our scripts for as long as its parent lives: nobody writes to the folder of a killed training.

    python train/child.py PARENT_PID SCRIPT [ARGUMENT ...]

What is asked of the kernel outlasts the exec, so that no script needs to know.  Called by `train/distill.py`.
"""

import os
import sys

from serve.lifetime import follow_parent

if __name__ == "__main__":
    follow_parent(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
