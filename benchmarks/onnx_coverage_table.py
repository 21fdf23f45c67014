def render(o): return ''
