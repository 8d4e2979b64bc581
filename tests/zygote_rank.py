"""A rank that was forked with everything imported: ``zygote_rank.py MODULE ARGUMENTS`` runs ``-m MODULE ARGUMENTS``, or
the script that MODULE is the path of.

Knows: what a fork of tests/faults/zygote.py has to put right. Does not know: what the module does.
"""

from __future__ import annotations

import logging
import runpy
import sys
import warnings

if __name__ == "__main__":
    logging.disable(logging.NOTSET)  # a zygote's launcher is silent
    warnings.filterwarnings("ignore", message=".*found in sys.modules.*", category=RuntimeWarning)  # so it shall be
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
