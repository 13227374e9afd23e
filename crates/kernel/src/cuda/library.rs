//! NVIDIA's libraries, found at run time.

#![allow(unsafe_code)]

use super::error::Error;
use libloading::Library;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Names a file of NVRTC to use instead of one in the usual places.
pub const NVRTC_VARIABLE: &str = "FLASHTILE_NVRTC";

const NVRTC_NAMES: &[&str] = if cfg!(windows) {
    &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll", "nvrtc64_112_0.dll"]
} else {
    &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"]
};

/// The names by which cudarc loads the driver.
const DRIVER_NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// `dlopen` always fails in a program that is linked with musl statically.
const LOADS_LIBRARIES: bool = !cfg!(all(target_env = "musl", target_feature = "crt-static"));

/// Asks for the driver before anything calls it. cudarc's own question is not there in a program that links to the driver, as one does
/// that has candle in it.
pub(super) fn driver() -> Result<(), Error> {
    if !LOADS_LIBRARIES {
        return Err(Error::Static { library: "driver" });
    }
    // SAFETY: loads the library by the system's rules; NVIDIA's initialisers have no preconditions.
    if DRIVER_NAMES.iter().any(|&name| unsafe { Library::new(name) }.is_ok()) {
        return Ok(());
    }
    Err(Error::Missing { library: "driver", tried: DRIVER_NAMES.join(", ") })
}

/// The library of the compiler, and the path or name by which it was found.
pub(super) fn nvrtc() -> Result<&'static (Library, String), Error> {
    if !LOADS_LIBRARIES {
        return Err(Error::Static { library: "NVRTC" });
    }
    static LIBRARY: OnceLock<Result<(Library, String), String>> = OnceLock::new();
    let found = LIBRARY.get_or_init(|| {
        let candidates = candidates();
        for name in &candidates {
            // The library looks for its second part by name: one beside it is found once it is loaded.
            if let Some(builtins) = builtins(name) {
                // SAFETY: as below.
                if let Ok(library) = unsafe { Library::new(&builtins) } {
                    std::mem::forget(library);
                }
            }
            // SAFETY: loads a library by name or path; NVIDIA's initialisers have no preconditions. A path that the
            // environment names is the user's own choice.
            if let Ok(library) = unsafe { Library::new(name) } {
                return Ok((library, name.display().to_string()));
            }
        }
        let names: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
        Err(names.join(", "))
    });
    found.as_ref().map_err(|tried| Error::Missing { library: "NVRTC", tried: tried.clone() })
}

/// The variable's file alone, or every name on the loader's search path and then in the toolkit's folders.
fn candidates() -> Vec<PathBuf> {
    if let Some(path) = std::env::var_os(NVRTC_VARIABLE) {
        return vec![path.into()];
    }
    let mut list: Vec<PathBuf> = NVRTC_NAMES.iter().map(PathBuf::from).collect();
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    for home in homes.chain([PathBuf::from("/usr/local/cuda")]) {
        for folder in ["lib64", "lib", "bin"] {
            list.extend(NVRTC_NAMES.iter().map(|name| home.join(folder).join(name)));
        }
    }
    list
}

/// The second part of the compiler beside a file of it.
fn builtins(nvrtc: &std::path::Path) -> Option<PathBuf> {
    let folder = nvrtc.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    let files = std::fs::read_dir(folder).ok()?;
    let is_builtins = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.contains("nvrtc-builtins") && !name.contains(".alt.") && !name.contains("static")
    };
    files.filter_map(Result::ok).map(|entry| entry.path()).find(is_builtins)
}
