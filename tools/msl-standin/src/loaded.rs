//! The shared library that a program becomes.
#![allow(unsafe_code)]

use std::path::Path;
use std::sync::Mutex;

use crate::reflection::{self, Facts};
use crate::run::{HOST, Host};
use crate::source::Program;

pub(crate) struct Loaded {
    pub(crate) library: libloading::Library,
    pub(crate) program: Program,
    /// Of each kernel of the program.
    pub(crate) facts: Vec<Facts>,
    /// Held during a run: all runs of a library share the memory of its function constants.
    pub(crate) running: Mutex<()>,
}

impl Loaded {
    /// Loads the library that `program` has been compiled to.
    pub(crate) fn new(path: &Path, program: Program) -> Result<Self, String> {
        // SAFETY: the library is compiled with the header, whose one initializer does nothing.
        let library =
            unsafe { libloading::Library::new(path) }.map_err(|e| format!("cannot load it: {e}"))?;
        // SAFETY: the header defines a table of 8 pointers with this name, and `Host` is no larger.
        unsafe {
            let table = library.get::<*mut Host>(b"msl_host").map_err(|e| e.to_string())?;
            let table: *mut Host = *table;
            std::ptr::copy_nonoverlapping(&raw const HOST, table, 1);
        }
        let facts = reflection::read(&library, &program).map_err(|e| e.to_string())?;
        Ok(Self { library, program, facts, running: Mutex::new(()) })
    }
}
