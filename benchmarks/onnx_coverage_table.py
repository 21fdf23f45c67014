def render(o):
    return ""
