"""Adds the `storm` command to a wheel: add-command.py WHEEL BINARY. Standard library only."""

import base64
import hashlib
import os
import sys
import zipfile

wheel, binary = sys.argv[1:]
with zipfile.ZipFile(wheel) as old:
    entries = [(info, old.read(info)) for info in old.infolist()]
[record] = [info.filename for info, _ in entries if info.filename.endswith(".dist-info/RECORD")]
name = record.removesuffix(".dist-info/RECORD") + ".data/scripts/storm"
with open(binary, "rb") as file:
    command = file.read()
digest = base64.urlsafe_b64encode(hashlib.sha256(command).digest()).rstrip(b"=").decode()
line = f"{name},sha256={digest},{len(command)}\n"

script = zipfile.ZipInfo(name)
script.external_attr = 0o100755 << 16
script.compress_type = zipfile.ZIP_DEFLATED
written = wheel + ".new"
with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as new:
    for info, data in entries:
        if info.filename == record:
            new.writestr(script, command)
            data = data.rstrip(b"\n") + b"\n" + line.encode()
        new.writestr(info, data)
os.replace(written, wheel)
