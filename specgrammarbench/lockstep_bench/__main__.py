"""`python -m lockstep_bench` is `lockstep-bench`."""

import sys

from lockstep_bench.cli import main

sys.exit(main())
