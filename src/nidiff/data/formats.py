"""Which kind of data a file holds, by its suffix; and for formats that are not read, the line that converts them."""

from collections.abc import Sequence
from pathlib import Path

KINDS = {
    "sounds": (".wav", ".wave", ".flac", ".ogg", ".mp3", ".aiff", ".aif"),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff"),
    "arrays": (".npy", ".npz", ".mat", ".pt", ".pth", ".safetensors"),
    "tables": (".nc", ".nc3", ".nc4", ".cdf", ".h5", ".hdf5", ".zarr", ".grib", ".grb", ".grib2", ".grb2"),
    "volumes": (".nii", ".nii.gz"),
    "slices": (".dcm", ".dicom", ".ima"),
    "videos": (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg"),
}
KIND_OF = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
NAMED = (".npz", ".mat", ".pt", ".pth", ".safetensors")  # files of several arrays, one of which `variables` names
FOLDERS = (".zarr",)  # folders that are read as one file

_PICTURES = "convert it to PNG, as by mogrify -format png"
_NIFTI = "SimpleITK.WriteImage(SimpleITK.ReadImage('{file}'), 'a.nii.gz')"
_TRUSTED = "only if you trust who wrote it, open it yourself, and numpy.save('a.npy', array)"
_SAVE = {  # what makes an array of a file
    ".fits": "astropy.io.fits.getdata('{file}')",
    ".fit": "astropy.io.fits.getdata('{file}')",
    ".sgy": "segyio.tools.cube('{file}')",
    ".segy": "segyio.tools.cube('{file}')",
    ".parquet": "pandas.read_parquet('{file}').to_numpy()",
    ".feather": "pandas.read_feather('{file}').to_numpy()",
    ".csv": "pandas.read_csv('{file}').to_numpy()",
    ".tsv": "pandas.read_csv('{file}', sep='\\t').to_numpy()",
    ".xlsx": "pandas.read_excel('{file}').to_numpy()",
    ".txt": "numpy.loadtxt('{file}')",
    ".hea": "wfdb.rdsamp('a')[0]",  # whose numbers are in .dat
    ".raw": "numpy.fromfile('{file}', dtype).reshape(shape)",
    ".bin": "numpy.fromfile('{file}', dtype).reshape(shape)",
    ".dat": "numpy.fromfile('{file}', dtype).reshape(shape)",
    ".edf": "mne.io.read_raw_edf('{file}').get_data()",
    ".exr": "imageio.v3.imread('{file}')",
    ".vtk": "pyvista.read('{file}')['name'].reshape(shape)",
    ".vti": "pyvista.read('{file}')['name'].reshape(shape)",
    ".bp": "adios2.FileReader('{file}').read('name')",
}
CONVERSIONS = {suffix: f"numpy.save('a.npy', {array})" for suffix, array in _SAVE.items()} | {
    ".rds": "in R, RcppCNPy::npySave('a.npy', readRDS('{file}'))",
    ".rdata": "in R, load('{file}'); RcppCNPy::npySave('a.npy', name)",
    ".pkl": _TRUSTED,
    ".pickle": _TRUSTED,
    ".joblib": _TRUSTED,
    ".hdf": "ncks -4 {file} a.nc, or gdal_translate -of netCDF {file} a.nc",
    ".he5": "rename it to .h5",
    ".mha": _NIFTI,
    ".mhd": _NIFTI,
    ".nrrd": _NIFTI,
    ".mgz": "nibabel.save(nibabel.load('{file}'), 'a.nii.gz')",
    ".m4a": "ffmpeg -i {file} a.wav",
    ".aac": "ffmpeg -i {file} a.wav",
    ".opus": "ffmpeg -i {file} a.wav",
    ".wmv": "ffmpeg -i {file} a.mp4",
    ".flv": "ffmpeg -i {file} a.mp4",
    ".gif": "ffmpeg -i {file} a.mp4; of a single frame, convert it to PNG",
    ".heic": _PICTURES,
    ".avif": _PICTURES,
    ".jp2": _PICTURES,
    ".svg": _PICTURES,
    ".tfrecord": "numpy.save('a.npy', array) of the arrays that tensorflow_datasets gives",
    ".zip": "unpack it",
    ".tar": "unpack it",
    ".tgz": "unpack it",
    ".gz": "unpack it",
    ".bz2": "unpack it",
    ".7z": "unpack it",
}


def suffix_of(path: Path) -> str:
    """The suffix by which the format of a file is known, in lower case."""
    name = path.name.lower()
    return ".nii.gz" if name.endswith(".nii.gz") else path.suffix.lower()


def kind_of(path: Path) -> str | None:
    """The kind of data of a file, one of `KINDS`; DICOM often has no suffix, and is known by its first bytes."""
    suffix = suffix_of(path)
    if suffix in KIND_OF or suffix in CONVERSIONS or path.is_dir() or path.name == "DICOMDIR":
        return KIND_OF.get(suffix)
    try:
        with path.open("rb") as file:
            return "slices" if file.read(132)[128:] == b"DICM" else None
    except OSError:
        return None


def conversion(suffixes: Sequence[str]) -> str:
    """The remedy for files of these suffixes, none of which is read."""
    for suffix, line in CONVERSIONS.items():
        if suffix in suffixes:
            return line.format(file=f"a{suffix}")
    kinds = ", ".join(suffixes[0] for suffixes in KINDS.values())
    return f"convert it to {kinds} or the like, or open it in Python and give the array to nidiff.load_dataset"
