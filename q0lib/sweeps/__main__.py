"""`python -m q0lib.sweeps`: a notebook over a grid of its parameters; `sweep` says how."""

import signal
import sys

from q0lib.sweeps import sweep

signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the points end first
sys.exit(sweep.main())
