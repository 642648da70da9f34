"""Former name of `jaxserve convert SRC DST`, for a checkout.

It imports nothing else of this folder, which would be imported a second time as a part of jaxserve.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("jaxserve.convert", run_name="__main__", alter_sys=True)
