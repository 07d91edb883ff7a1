"""`python -m ebbtide` is `ebbtide`."""

import sys

from ebbtide.cli.main import main

sys.exit(main())
