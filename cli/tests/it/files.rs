//! Files and processes.

use safetensors::tensor::{Dtype, Metadata, TensorView};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    pub(crate) fn f32(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn i64(values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { dtype: Dtype::I64, shape: vec![values.len()], bytes }
    }

    pub(crate) fn i32(values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { dtype: Dtype::I32, shape: vec![values.len()], bytes }
    }

    pub(crate) fn bool(shape: &[usize], values: impl Iterator<Item = bool>) -> Self {
        Self { dtype: Dtype::BOOL, shape: shape.to_vec(), bytes: values.map(u8::from).collect() }
    }

    /// Values in [-1, 1], determined by a seed.
    pub(crate) fn random(dtype: Dtype, shape: &[usize], seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut bytes = Vec::new();
        for _ in 0..shape.iter().product() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let x = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
            match dtype {
                Dtype::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
                Dtype::BF16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
                _ => bytes.extend(x.to_le_bytes()),
            }
        }
        Self { dtype, shape: shape.to_vec(), bytes }
    }

    /// Its elements in another shape.
    pub(crate) fn with_shape(&self, shape: &[usize]) -> Self {
        Self { shape: shape.to_vec(), ..self.clone() }
    }

    /// Elements of a floating-point tensor.
    pub(crate) fn values(&self) -> Vec<f64> {
        let two = |x: &[u8]| [x[0], x[1]];
        match self.dtype {
            Dtype::F32 => self
                .bytes
                .chunks(4)
                .map(|x| f64::from(f32::from_le_bytes([x[0], x[1], x[2], x[3]])))
                .collect(),
            Dtype::F16 => self.bytes.chunks(2).map(|x| half::f16::from_le_bytes(two(x)).to_f64()).collect(),
            Dtype::BF16 => self.bytes.chunks(2).map(|x| half::bf16::from_le_bytes(two(x)).to_f64()).collect(),
            other => panic!("{other:?} is no floating-point type"),
        }
    }

    /// The tensor with axes 1 and 2 exchanged.
    pub(crate) fn transposed(&self) -> Self {
        let [b, m, n, d] = self.shape[..] else { panic!("rank 4, not {:?}", self.shape) };
        let row = d * self.bytes.len() / self.shape.iter().product::<usize>();
        let mut bytes = Vec::new();
        for b in 0..b {
            for n_index in 0..n {
                for m_index in 0..m {
                    bytes.extend(&self.bytes[((b * m + m_index) * n + n_index) * row..][..row]);
                }
            }
        }
        Self { dtype: self.dtype, shape: vec![b, n, m, d], bytes }
    }
}

pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// q, k and v with these shapes.
pub(crate) fn qkv(dtype: Dtype, q: &[usize], k: &[usize], v: &[usize]) -> Tensors {
    let tensor = |name: &str, shape, seed| (name.to_owned(), Tensor::random(dtype, shape, seed));
    BTreeMap::from([tensor("q", q, 1), tensor("k", k, 2), tensor("v", v, 3)])
}

pub(crate) fn write(path: &Path, tensors: &Tensors) {
    let views =
        tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// Writes a header unchanged, followed by data.
pub(crate) fn write_raw(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
}

pub(crate) fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let metadata: Metadata = serde_json::from_slice(header).unwrap();
    let tensor = |(name, info): (String, &safetensors::tensor::TensorInfo)| {
        let bytes = data[info.data_offsets.0..info.data_offsets.1].to_vec();
        (name, Tensor { dtype: info.dtype, shape: info.shape.clone(), bytes })
    };
    metadata.tensors().into_iter().map(tensor).collect()
}

pub(crate) fn flashtile<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flashtile")).args(args).output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Threads that the machine runs at once.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

/// A folder with an input file for `flashtile run`.
pub(crate) struct Folder {
    folder: tempfile::TempDir,
    pub(crate) input: PathBuf,
    pub(crate) output: PathBuf,
}

impl Folder {
    pub(crate) fn empty() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
        Self { folder, input, output }
    }

    pub(crate) fn with(tensors: &Tensors) -> Self {
        let folder = Self::empty();
        write(&folder.input, tensors);
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Names of the files in the folder.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(crate) fn try_run(&self, options: &[&str]) -> Output {
        let files = ["run".as_ref(), self.input.as_os_str(), "-o".as_ref(), self.output.as_os_str()];
        flashtile(files.into_iter().chain(options.iter().map(|o| o.as_ref())))
    }

    /// Runs, expects success, and reads the output file.
    pub(crate) fn run(&self, options: &[&str]) -> Tensors {
        let output = self.try_run(options);
        assert!(output.status.success(), "{options:?}: {}", stderr(&output));
        assert!(stdout(&output).starts_with("kernel     "), "{options:?}");
        read(&self.output)
    }

    /// Runs and expects a refusal: status 2, one line that contains `why`, and no new file.
    pub(crate) fn refuse(&self, options: &[&str], why: &str) {
        let before = self.names();
        let output = self.try_run(options);
        assert_refused(&output, why, &format!("{options:?}"));
        assert_eq!(self.names(), before, "{options:?}");
    }
}

pub(crate) fn assert_refused(output: &Output, why: &str, case: &str) {
    let line = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{case}: {line}");
    assert!(line.starts_with("flashtile: ") && line.ends_with('\n'), "{case}: {line}");
    assert_eq!(line.lines().count(), 1, "{case}: {line}");
    assert!(line.contains(why), "{case}: expected '{why}' in: {line}");
    assert!(output.stdout.is_empty(), "{case}");
}

/// Root mean square difference relative to the root mean square of the expected values.
pub(crate) fn nrmse(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let error: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    let power: f64 = want.iter().map(|w| w.powi(2)).sum();
    if error == 0.0 { 0.0 } else { (error / power).sqrt() }
}

pub(crate) fn max_abs(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let difference = |(g, w): (&f64, &f64)| if g == w { 0.0 } else { (g - w).abs() };
    // A maximum would ignore NaN.
    got.iter().zip(want).map(difference).fold(0.0, |m, x| if x > m || x.is_nan() { x } else { m })
}
