"""What pyproject.toml cannot say: the wheel carries a start-up hook at the root of site-packages."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

PTH_NAME = "compact_state_lmdeploy.pth"
# One line that starts with `import`: `site` runs it in every process. Off, it reads one variable and imports nothing.
PTH_LINE = (
    "import os; os.environ.get('LMDEPLOY_ENABLE_COMPACT_STATE', '0').strip().lower() in ('0', 'false', 'no', 'off')"
    " or __import__('compact_state.integration._boot', fromlist=['boot']).boot()\n"
)


def _commands() -> dict[str, Any]:
    from setuptools.command.build_py import build_py
    from setuptools.command.editable_wheel import editable_wheel

    class BuildWithHook(build_py):
        """A wheel's files, the hook among them."""

        def run(self) -> None:
            super().run()
            if not self.editable_mode:
                Path(self.build_lib).mkdir(parents=True, exist_ok=True)
                (Path(self.build_lib) / PTH_NAME).write_text(PTH_LINE)

    class EditableWithHook(editable_wheel):
        """An editable wheel holds a path to the sources; the hook is added to it and to its RECORD."""

        def run(self) -> None:
            super().run()
            for path in Path(self.dist_dir).glob("*.whl"):
                self._add_hook(path)

        @staticmethod
        def _add_hook(path: Path) -> None:
            with zipfile.ZipFile(path) as wheel:
                files = {name: wheel.read(name) for name in wheel.namelist()}
            if PTH_NAME in files:
                return
            record = next(name for name in files if name.endswith(".dist-info/RECORD"))
            line = PTH_LINE.encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(line).digest()).rstrip(b"=").decode()
            files[record] = f"{PTH_NAME},sha256={digest},{len(line)}\n".encode() + files[record]
            files[PTH_NAME] = line
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
                for name, data in files.items():
                    wheel.writestr(name, data)

    return {"build_py": BuildWithHook, "editable_wheel": EditableWithHook}


if __name__ in ("__main__", "setup"):
    from setuptools import setup

    setup(cmdclass=_commands())
