//! `objc2` asks the linker for `objc`, `objc2-foundation` for `gnustep-base` and `dispatch2` for `dispatch`. Their symbols are in this
//! crate and in those above it: the libraries that the linker finds under these names are empty.

use std::io;
use std::path::Path;

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    let out = std::env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("cargo sets OUT_DIR"))?;
    for name in ["objc", "gnustep-base", "dispatch"] {
        // An archive without members.
        std::fs::write(Path::new(&out).join(format!("lib{name}.a")), b"!<arch>\n")?;
    }
    println!("cargo:rustc-link-search=native={}", Path::new(&out).display());
    Ok(())
}
