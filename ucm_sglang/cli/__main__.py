"""`python -m ucm_sglang.cli`, for where the console script is not on the path."""

import sys

from ucm_sglang.cli import main

sys.exit(main())
