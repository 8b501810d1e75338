"""`python -m dtprof` is the `dtprof` command."""

import sys

from dtprof.cli.main import main

sys.exit(main())
