"""The kernel of a notebook, in which tests run cells."""

from pathlib import Path

from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[1]


class Kernel:
    """A process that runs the cells of a notebook."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(ROOT))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def begin(self, cell: str) -> str:
        """Begin to run a cell, and return its id."""
        return self.client.execute(cell, store_history=False)

    def end(self, cell_id: str) -> str:
        """Wait for the cell's end; return "" or the name of its error."""
        while True:
            reply = self.client.get_shell_msg(timeout=300)
            if reply["parent_header"].get("msg_id") == cell_id:
                return reply["content"].get("ename", "")

    def run(self, cell: str) -> str:
        return self.end(self.begin(cell))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
