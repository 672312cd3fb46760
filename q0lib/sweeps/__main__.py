"""`python -m q0lib.sweeps`: a notebook over a grid of its parameters; `sweep` says how."""

import sys

from q0lib.sweeps import sweep

sys.exit(sweep.main())
