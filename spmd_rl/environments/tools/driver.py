"""Program that runs inside the sandbox: it executes what the policy asks for. It never runs here.

It first writes an empty line. Then it reads calls from its stdin, a line of JSON each, and answers
each with what was printed. Python has one set of names for all calls, and prints the value of a
last line that is an expression. A command of the shell is a process of its own.
"""

from __future__ import annotations

DRIVER = """
import ast, json, os, subprocess, sys, traceback

calls, answers = os.fdopen(os.dup(0)), os.dup(1)
os.set_inheritable(calls.fileno(), False)
os.set_inheritable(answers, False)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.chdir("/tmp")
sys.argv = [""]
own, names = os.getpid(), {"__name__": "__main__"}


def run_python(text):
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<call>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<call>", "eval"), names)
        if value is not None:
            print(repr(value))


def answer(data):
    data += b"\\n"
    while data:
        data = data[os.write(answers, data):]


answer(b"")
for line in calls:
    call = json.loads(line)
    file = os.open("/tmp/.output", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        if call["tool"] == "python":
            run_python(call["text"])
        else:
            code = subprocess.run(["/bin/sh", "-c", call["text"]]).returncode
            if code:
                print("exit code", code)
    except SystemExit:
        pass
    except BaseException as error:
        place = error.__traceback__
        while place and place.tb_frame.f_code.co_filename == __file__:
            place = place.tb_next
        traceback.print_exception(type(error), error, place, limit=-4)
    if os.getpid() != own:  # the call has forked
        os._exit(0)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the file of the output is full
        sys.stdout, sys.stderr = (open(one, "w", closefd=False) for one in (1, 2))
    size = os.lseek(file, 0, os.SEEK_END)
    printed = os.pread(file, call["max_bytes"], 0)
    os.close(file)
    text = printed.decode(errors="replace")
    answer(json.dumps({"id": call["id"], "text": text, "size": size}).encode())
"""
