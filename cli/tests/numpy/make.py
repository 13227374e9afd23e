"""Writes the archives of this folder with numpy: one problem in every form that numpy gives an archive."""

import io
import zipfile

import numpy as np

random = np.random.default_rng(0)
arrays = {
    "q": random.standard_normal((1, 2, 3, 8), dtype=np.float32),
    "k": random.standard_normal((1, 1, 4, 8), dtype=np.float32),
    "v": random.standard_normal((1, 1, 4, 8), dtype=np.float32),
    "mask": np.tri(3, 4, dtype=bool)[None, None],
    "note": np.array("layer 3"),
}
np.savez("savez.npz", **arrays)
np.savez_compressed("savez_compressed.npz", **arrays)

# Versions 2.0 and 3.0 of the header, arrays that attention has no use for, a folder and a text.
with zipfile.ZipFile("members.npz", "w", zipfile.ZIP_DEFLATED) as archive:
    archive.mkdir("folder")
    archive.writestr("readme.txt", "not an array")
    unused = {
        "object": np.array([None, 1], dtype=object),
        "records": np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
        "big_endian": np.zeros(3, dtype=">f4"),
        "fortran": np.zeros((2, 3), order="F"),
    }
    for n, (name, array) in enumerate((arrays | unused).items()):
        file = io.BytesIO()
        np.lib.format.write_array(file, array, version=[(1, 0), (2, 0), (3, 0)][n % 3])
        archive.writestr(f"{name}.npy", file.getvalue())

# Sizes and offsets as archives beyond 4 GiB have them.
zipfile.ZIP64_LIMIT = 0
zipfile.ZIP_FILECOUNT_LIMIT = 0
np.savez("zip64.npz", **arrays)

for name in ["savez", "savez_compressed", "members", "zip64"]:
    with np.load(f"{name}.npz") as loaded:
        assert all((loaded[name] == array).all() for name, array in arrays.items())
