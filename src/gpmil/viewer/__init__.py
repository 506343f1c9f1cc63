"""The viewer: a page in the browser that walks through the slides of finished runs.

`gpmil view RUN` starts a small server on this computer. It reads run folders and slide files and
never writes to them. Nothing here needs torch: the page is there in a second or two.
"""
