# SPDX-License-Identifier: Apache-2.0
"""The default job on a store that takes SLOW_STORE_S for every data object; under torchrun.

torchrun --nproc-per-node 2 tests/integration/jobs/slow_store_llama.py
"""

import os
import sys
import time
from pathlib import Path

from raydist import main
from raydist.storage import open_store
from raydist.train import rank

sys.path.insert(0, str(Path(__file__).parents[3] / "jobs"))

from llama_zero3 import JOB


class SlowStore:
    """A store whose data objects take their time."""

    def __init__(self, inner):
        self.inner = inner
        self.get, self.size, self.list, self.delete = (
            inner.get, inner.size, inner.list, inner.delete,
        )  # fmt: skip

    def put(self, key, data, *, if_absent=False):
        if key.endswith(".safetensors"):
            time.sleep(float(os.environ["SLOW_STORE_S"]))
        self.inner.put(key, data, if_absent=if_absent)


rank.open_store = lambda url: SlowStore(open_store(url))

if __name__ == "__main__":
    raise SystemExit(main(JOB))
