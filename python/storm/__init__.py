"""STORM for PyTorch: offloads what autograd saves to host memory and fetches it back just in time.

>>> import storm
>>> with storm.offload(vram="24GiB") as s:
...     loss = model(batch).loss
>>> loss.backward()
>>> print(s.report())

or, for every forward pass of a model, ``model = storm.wrap(model, vram="24GiB")``.
Gradients equal those of the loop without STORM, bit for bit.
"""

from ._native import __version__
from ._offload import Offload, offload, session, wrap
from ._report import Report

__all__ = ["Offload", "Report", "__version__", "offload", "session", "wrap"]
