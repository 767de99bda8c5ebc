"""``python -m minivllm`` is the command ``minivllm``."""

import sys

from minivllm.cli import main

sys.exit(main())
