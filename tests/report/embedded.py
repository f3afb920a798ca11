"""What a page holds."""

import json
import re


def data(text):
    """What a page holds."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
