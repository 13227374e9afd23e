//! Metal Shading Language, compiled by the stand-in once a source and process.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, OnceLock};

use flashtile_msl_standin::{Compiler, Library};
use objc2_metal::{MTLLanguageVersion, MTLLibraryError};

use crate::machine::{Machine, lock};

/// Why a library is refused.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) code: MTLLibraryError,
    pub(crate) text: String,
}

/// A program and what decides how it is compiled.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) source: String,
    pub(crate) language: Option<MTLLanguageVersion>,
    /// Names and values of `preprocessorMacros`.
    pub(crate) macros: Vec<(String, String)>,
}

/// Compiles a program for a device. Another compilation of the same source takes no time, and counts as one all the same.
pub(crate) fn compile(machine: &Machine, program: &Program) -> Result<Library, Refusal> {
    machine.count(|c| c.libraries += 1);
    let failure = |text: String| Refusal { code: MTLLibraryError::CompileFailure, text };
    if let Some(text) = lock(&machine.faults).compilations.pop_front() {
        return Err(failure(text));
    }
    let newest = machine.profile.newest_language;
    let language = program.language.unwrap_or(newest);
    if language > newest {
        let text = format!("language version {} is newer than {}", shown(language), shown(newest));
        return Err(Refusal { code: MTLLibraryError::Unsupported, text });
    }
    // "Metal Shading Language Specification", section 2.1: bfloat is of Metal 3.1 and later.
    if language < MTLLanguageVersion::Version3_1 && words(&program.source).any(|w| w.starts_with("bfloat")) {
        let text = format!("program_source: error: unknown type name 'bfloat' in Metal {}", shown(language));
        return Err(failure(text));
    }
    let mut source = String::new();
    for (name, value) in &program.macros {
        source.push_str(&format!("#define {name} {value}\n"));
    }
    if !program.macros.is_empty() {
        // Messages name the lines of the program.
        source.push_str("#line 1\n");
    }
    source.push_str(&program.source);
    compiled(source).map_err(failure)
}

fn compiled(source: String) -> Result<Library, String> {
    /// A library, or the messages of the compiler.
    type Compiled = Result<Library, String>;
    static COMPILER: OnceLock<Compiler> = OnceLock::new();
    static CACHE: LazyLock<Mutex<HashMap<String, Compiled>>> = LazyLock::new(Mutex::default);
    let found = lock(&CACHE).get(&source).cloned();
    found.unwrap_or_else(|| {
        let compiler = COMPILER.get_or_init(|| Compiler::find().unwrap_or_else(|e| panic!("{e}")));
        // Without the lock: programs are compiled side by side.
        let result = compiler.compile(&source).map_err(|e| e.messages().to_owned());
        lock(&CACHE).insert(source, result.clone());
        result
    })
}

/// `3.1`.
fn shown(version: MTLLanguageVersion) -> String {
    format!("{}.{}", version.0 >> 16, version.0 & 0xffff)
}

/// The words of a program outside of comments.
fn words(source: &str) -> impl Iterator<Item = &str> {
    source
        .lines()
        .filter_map(|line| line.split("//").next())
        .flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'))
}

/// A number that tells programs apart, the same in every process: FNV-1a of 128 bits.
pub(crate) fn digest(text: &str) -> u128 {
    let start = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    text.bytes()
        .fold(start, |h: u128, b| (h ^ u128::from(b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b))
}
