"""Files of traces: for trace viewers (chrome.py), as a page (page.py) and a picture (picture.py)."""
