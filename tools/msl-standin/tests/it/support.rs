use std::sync::OnceLock;

use flashtile_msl_standin::{Buffer, CLANG_VARIABLE, Compiler, Kernel, Library, RunError};

/// The compiler, or a line on stderr that says why there is none. A compiler that the variable names must work.
pub(crate) fn compiler() -> Option<&'static Compiler> {
    static FOUND: OnceLock<Option<Compiler>> = OnceLock::new();
    FOUND
        .get_or_init(|| match Compiler::find() {
            Ok(compiler) => Some(compiler),
            Err(why) if std::env::var_os(CLANG_VARIABLE).is_some() => {
                panic!("{CLANG_VARIABLE} is set, but {why}")
            }
            Err(why) => {
                eprintln!("skipped: {why}");
                None
            }
        })
        .as_ref()
}

const LEAD: &str = "#include <metal_stdlib>\nusing namespace metal;\n";

pub(crate) fn library(compiler: &Compiler, source: &str) -> Library {
    compiler.compile(&format!("{LEAD}{source}")).unwrap_or_else(|e| panic!("{source}\n{e}"))
}

pub(crate) fn refusal(compiler: &Compiler, source: &str) -> String {
    match compiler.compile(&format!("{LEAD}{source}")) {
        Ok(_) => panic!("accepted:\n{source}"),
        Err(e) => e.to_string(),
    }
}

pub(crate) fn bytes<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| to(v)).collect()
}

pub(crate) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

pub(crate) fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect()
}

/// Runs one threadgroup with the inputs in buffers 1 and up; buffer 0, whose bytes start as 0xff.
pub(crate) fn one_group(
    kernel: &Kernel,
    threads: u32,
    inputs: &[&[u8]],
    out: usize,
) -> Result<Vec<u8>, RunError> {
    let mut result = vec![0xff; out];
    let mut buffers = vec![Buffer::write(0, &mut result)];
    buffers.extend(inputs.iter().enumerate().map(|(i, b)| Buffer::read(i + 1, b)));
    kernel.run([1, 1, 1], [threads, 1, 1], &mut buffers, &[])?;
    drop(buffers);
    Ok(result)
}
