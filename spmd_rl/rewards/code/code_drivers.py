"""Programs that call a model's program inside the sandbox. This process never runs them.

Each reads its call from stdin and writes its answer to the standard output that it was given. What
the model's program prints meanwhile is lost.
"""

from __future__ import annotations

_BEGIN = """
import bisect, builtins, collections, copy, functools, heapq, itertools, json, math, operator, os
import random, re, string, sys, typing

for module in (typing, collections, functools, heapq, bisect, itertools):
    for name in getattr(module, "__all__", dir(module)):
        if not name.startswith("_") and not hasattr(builtins, name):
            setattr(builtins, name, getattr(module, name))
for module in (bisect, collections, copy, functools, heapq, itertools, math, operator, random, re,
               string, sys, typing):
    setattr(builtins, module.__name__, module)
builtins.inf = math.inf
call = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
import program
"""

# Common modules and their names are known, as on the sites that such tasks come from.
CALL = (
    _BEGIN
    + """
def as_json(value):
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(type(value).__name__)

if hasattr(program, call["function"]):
    function = getattr(program, call["function"])
else:
    function = getattr(program.Solution(), call["function"])
text = json.dumps(function(*call["arguments"]), default=as_json).encode()
while text:
    text = text[os.write(answer, text):]
"""
)

# The token says that the end was reached. It is another one each time.
ASSERT = (
    _BEGIN
    + """
exec(compile(call["test"], "test", "exec"), vars(program))
os.write(answer, call["token"].encode())
"""
)
