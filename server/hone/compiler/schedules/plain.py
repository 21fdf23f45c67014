from dataclasses import dataclass
from typing import Any
@dataclass
class S:
    func: Any
    rule: str
    work: float
    parallel: bool
def plain_schedule(func, target):
    return S(func,"none",0,False)
