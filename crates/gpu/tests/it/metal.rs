//! The kernels printed as Metal: compiled as C++, and run on the CPU, against the oracle and against the simulator.
//!
//! `FLASHTILE_CLANG` names the compiler; where there is none the tests say that they did not run.

use super::encode::{Case as Rows, run_on, vector};
use flashtile_core::codec::Codec;
use flashtile_core::codec::{Coder, Side};
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::problem::Problem;
use flashtile_gpu::codecs::factors;
use flashtile_gpu::encoding;
use flashtile_gpu::kernels::encode;
use flashtile_gpu::kernels::mask_tiles::{Mask, mask_tiles};
use flashtile_gpu::kernels::merge::{Merge, merge};
use flashtile_gpu::kernels::rotation::hadamard;
use flashtile_gpu::registry::instances;
use flashtile_gpu::tile::{PortableTile, Tiling};
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::source::Instance;
use flashtile_kernel::{Argument, Device, Generic, Launch, Plain, Scalar, ScalarType, Target, bf16, f16};
use flashtile_msl_standin::{Buffer, CLANG_VARIABLE, Compiler, FunctionConstant, Library, Value};
use flashtile_testkit::{
    Case, Failure, Rng, RunReport, Runner, RunnerError, SimulatorRunner, catalogue, quantized, run_case,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// The compiler, or a loud word that there is none. Where the variable names one, there has to be one.
fn compiler() -> Option<&'static Compiler> {
    static FOUND: OnceLock<Option<Compiler>> = OnceLock::new();
    let find = || match Compiler::find() {
        Ok(compiler) => Some(compiler),
        Err(why) if std::env::var_os(CLANG_VARIABLE).is_some() => {
            panic!("{CLANG_VARIABLE} is set, but {why}")
        }
        Err(why) => {
            eprintln!("SKIPPED, printed Metal is neither compiled nor run: {why}");
            None
        }
    };
    FOUND.get_or_init(find).as_ref()
}

/// Does something for each of a list on every processor; what went wrong.
fn each<T: Sync>(all: &[T], one: impl Fn(&T) -> Result<(), String> + Sync) -> Vec<String> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some(x) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = one(x) {
                        failed.lock().unwrap().push(why);
                    }
                }
            });
        }
    });
    failed.into_inner().unwrap()
}

#[test]
fn every_eighth_instance_compiles() {
    compile_every(8);
}

#[test]
#[ignore = "takes minutes: a compiler starts for each of hundreds of programs"]
fn every_instance_compiles() {
    compile_every(1);
}

fn compile_every(step: usize) {
    let Some(compiler) = compiler() else { return };
    let all: Vec<_> = instances().into_iter().step_by(step).collect();
    let failed = each(&all, |instance| {
        let text = instance.source(Target::Metal);
        compiler.check(&text).map_err(|why| format!("{}:\n{why}", instance.entry()))
    });
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), all.len(), failed.join("\n"));
    assert!(all.len() > 100 / step, "{}", all.len());
}

/// Compiled instances, run on the CPU. Memory is the simulator's; what nothing was written to is ones in every bit.
#[derive(Clone)]
struct Metal {
    compiler: &'static Compiler,
    libraries: Arc<Mutex<HashMap<String, Library>>>,
}

impl Metal {
    /// The one of this process, whose instances are compiled once.
    fn find() -> Option<Self> {
        static ALL: OnceLock<Arc<Mutex<HashMap<String, Library>>>> = OnceLock::new();
        Some(Self { compiler: compiler()?, libraries: ALL.get_or_init(Arc::default).clone() })
    }

    fn library(&self, instance: &Instance) -> Result<Library, Failed> {
        let entry = instance.entry();
        if let Some(library) = self.libraries.lock().unwrap().get(&entry) {
            return Ok(library.clone());
        }
        let library = self.compiler.compile(&instance.source(Target::Metal)).map_err(Failed::new)?;
        self.libraries.lock().unwrap().insert(entry, library.clone());
        Ok(library)
    }
}

/// Why a launch failed.
#[derive(Debug)]
struct Failed(String);

impl Failed {
    fn new(why: impl std::fmt::Display) -> Self {
        Self(why.to_string())
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

fn bytes_as<T: Scalar>(memory: &Memory) -> Vec<u8> {
    let mut bytes = Vec::new();
    let ones = T::read(&mut &[0xff; 8][..]);
    memory.to_vec_or(ones).unwrap().iter().for_each(|x| x.write(&mut bytes));
    bytes
}

fn memory_as<T: Scalar>(bytes: &[u8]) -> Memory {
    Memory::from_slice(&bytes.chunks_exact(T::BYTES).map(|mut x| T::read(&mut x)).collect::<Vec<_>>())
}

fn bytes_of(memory: &Memory) -> Result<Vec<u8>, Failed> {
    Ok(match memory.element() {
        ScalarType::U8 => bytes_as::<u8>(memory),
        ScalarType::U32 => bytes_as::<u32>(memory),
        ScalarType::I32 => bytes_as::<i32>(memory),
        ScalarType::F32 => bytes_as::<f32>(memory),
        ScalarType::F16 => bytes_as::<f16>(memory),
        ScalarType::Bf16 => bytes_as::<bf16>(memory),
        other => return Err(Failed(format!("no kernel has buffers of {other}"))),
    })
}

fn memory_of(element: ScalarType, bytes: &[u8]) -> Result<Memory, Failed> {
    Ok(match element {
        ScalarType::U8 => memory_as::<u8>(bytes),
        ScalarType::U32 => memory_as::<u32>(bytes),
        ScalarType::I32 => memory_as::<i32>(bytes),
        ScalarType::F32 => memory_as::<f32>(bytes),
        ScalarType::F16 => memory_as::<f16>(bytes),
        ScalarType::Bf16 => memory_as::<bf16>(bytes),
        other => return Err(Failed(format!("no kernel has buffers of {other}"))),
    })
}

impl Device for Metal {
    type Memory = Memory;
    type Error = Failed;

    fn launch(&self, mut launch: Launch<'_, Memory>) -> Result<(), Failed> {
        let library = self.library(launch.instance())?;
        let mut constants = Vec::new();
        for (n, constant) in launch.constants().enumerate() {
            let raw = constant.raw() as u32;
            let value = match constant.scalar() {
                ScalarType::Bool => Value::Bool(raw != 0),
                ScalarType::U32 => Value::U32(raw),
                ScalarType::I32 => Value::I32(raw.cast_signed()),
                ScalarType::F32 => Value::F32(f32::from_bits(raw)),
                other => return Err(Failed(format!("no function constant is a {other}"))),
            };
            constants.push(FunctionConstant::new(n as u32, value));
        }
        let kernel = library.kernel(&launch.instance().entry(), &constants).map_err(Failed::new)?;
        // The bytes of each memory, and the span that the kernel is given, in the order of buffers.
        let mut all = Vec::new();
        for argument in launch.arguments() {
            let (memory, span, writable) = match argument {
                Argument::Read(view) => (view.memory(), view.span(), false),
                Argument::Write(view) => (view.memory(), view.span(), true),
                Argument::Bytes(bytes) => {
                    all.push((bytes.clone(), 0..bytes.len(), false));
                    continue;
                }
                Argument::Constant(_) => continue,
            };
            let size = span.element.bytes();
            all.push((bytes_of(memory)?, span.offset * size..(span.offset + span.len) * size, writable));
        }
        let mut buffers = Vec::new();
        for (n, (bytes, range, writable)) in all.iter_mut().enumerate() {
            let bytes = bytes.get_mut(range.clone()).ok_or_else(|| Failed("a span is outside".to_owned()))?;
            buffers.push(if *writable { Buffer::write(n, bytes) } else { Buffer::read(n, bytes) });
        }
        kernel.run(launch.groups(), [launch.threads(), 1, 1], &mut buffers, &[]).map_err(Failed::new)?;
        drop(buffers);
        let passed = launch.arguments_mut().iter_mut().filter(|a| !matches!(a, Argument::Constant(_)));
        for (argument, (bytes, ..)) in passed.zip(&all) {
            if let Argument::Write(view) = argument {
                *view.memory_mut() = memory_of(view.element(), bytes)?;
            }
        }
        Ok(())
    }
}

/// Problems on printed Metal.
struct MetalRunner {
    device: Metal,
    on: SimulatorRunner,
}

impl Runner for MetalRunner {
    fn name(&self) -> String {
        "metal".to_owned()
    }

    fn run(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<RunReport, RunnerError> {
        self.on.run_on(&self.device, problem, inputs, outputs)
    }
}

/// Two SIMD groups in each of two splits.
const DECODE: Tiling = PortableTile::new(8, 16, 2, 1).with_splits(2);

/// Two SIMD groups of 16 rows, blocks of 32 keys.
const PREFILL: PortableTile = PortableTile::prefill(32, 32, 2, 1);

/// Runs the cases that a device takes; at least `at_least` must pass.
fn agree_with_the_oracle(cases: impl Iterator<Item = Case>, tiling: impl Into<Tiling>, at_least: usize) {
    let Some(device) = Metal::find() else { return };
    let cases: Vec<Case> = cases.collect();
    let (passed, refused) = (AtomicUsize::new(0), Mutex::new(BTreeMap::<String, usize>::new()));
    let on = SimulatorRunner::with_tile(tiling, |instance| Some(instance.clone()));
    let runner = MetalRunner { device, on };
    let failed = each(&cases, |case| {
        match run_case(case, &runner) {
            Ok(_) => passed.fetch_add(1, Ordering::Relaxed),
            Err(Failure::Skipped(why)) => {
                *refused.lock().unwrap().entry(why).or_default() += 1;
                0
            }
            Err(failure) => return Err(format!("{}: {failure}", case.name)),
        };
        Ok(())
    });
    for (why, count) in refused.into_inner().unwrap() {
        eprintln!("{count} refused: {why}");
    }
    let passed = passed.into_inner();
    assert!(failed.is_empty(), "{passed} passed, {} failed:\n{}", failed.len(), failed.join("\n"));
    eprintln!("{passed} passed with {} instances so far", runner.device.libraries.lock().unwrap().len());
    assert!(passed >= at_least, "{passed} passed");
}

/// Scores of a case.
fn scores(case: &Case) -> usize {
    case.desc.clone().validate().map_or(usize::MAX, |problem| {
        let pairs: usize = problem.sequences().iter().map(|s| s.q_len * s.kv_len).sum();
        pairs * problem.dims().q_heads
    })
}

/// Every layout, mask and feature is in cases of these dimensions; each other one would be an instance more to compile.
fn has_dims(case: &Case, wanted: &[[usize; 2]]) -> bool {
    wanted.contains(&[case.desc.dims.head_dim, case.desc.dims.value_dim])
}

#[test]
fn elements_agree_with_the_oracle() {
    let dims = [[32, 32], [64, 64], [96, 80]];
    let of = |case: &Case| has_dims(case, &dims) && scores(case) <= 5_000;
    agree_with_the_oracle(catalogue().into_iter().filter(of), DECODE, 1);
}

#[test]
fn elements_agree_with_the_oracle_by_prefill() {
    let dims = [[64, 64], [96, 80]];
    let of = |case: &Case| has_dims(case, &dims) && scores(case) <= 5_000;
    agree_with_the_oracle(catalogue().into_iter().filter(of), PREFILL, 1);
}

#[test]
fn elements_agree_with_the_oracle_by_prefill_with_one_block() {
    let tile = PortableTile::prefill(32, 16, 4, 1).with_team(2).with_one_block();
    let of = |case: &Case| has_dims(case, &[[64, 64]]) && scores(case) <= 5_000;
    agree_with_the_oracle(catalogue().into_iter().filter(of), tile, 1);
}

#[test]
fn codes_agree_with_the_oracle() {
    let names = ["single_d64", "single_d320", "centered_softcap", "pair_steps", "tree", "mask_additive"];
    let of = |case: &Case| {
        names.iter().any(|name| case.name.starts_with(&format!("quantized_{name}"))) && scores(case) <= 12_000
    };
    agree_with_the_oracle(quantized().into_iter().filter(of), DECODE, 1);
}

/// Numbers without end, some of them large.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next() * (next() * 12.0).exp2()).collect()
}

fn bits(memory: &Memory) -> Vec<u32> {
    memory.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
}

fn rotated<D: Device<Memory = Memory>>(
    device: &D,
    instance: &Instance,
    codec: Codec,
    back: bool,
) -> Vec<u32> {
    let dim = match instance.generics() {
        [Generic::Usize(dim), ..] => *dim,
        other => panic!("{other:?}"),
    };
    let rows = 9;
    let x = Memory::from_slice(&numbers(rows * dim, dim as u32));
    let factors = Memory::from_slice(&factors(codec, dim));
    let mut out = Memory::uninit::<f32>(rows * dim);
    hadamard::Call {
        x: x.view(),
        factors: factors.view(),
        out: out.view_mut(),
        rows: rows as u32,
        back,
        groups: [3, 1, 1],
    }
    .launch_instance(device, instance)
    .unwrap();
    bits(&out)
}

#[test]
fn rotations_are_the_simulators_bit_for_bit() {
    let Some(device) = Metal::find() else { return };
    let all = [hadamard::instance::<64, 1>(), hadamard::instance::<96, 12>(), hadamard::instance::<80, 20>()];
    let failed = each(&all, |instance| {
        for back in [false, true] {
            let wanted = rotated(&Simulator::new(), instance, Codec::Tq4, back);
            if rotated(&device, instance, Codec::Tq4, back) != wanted {
                return Err(format!("{} {back}", instance.entry()));
            }
        }
        Ok(())
    });
    assert!(failed.is_empty(), "{failed:?}");
}

fn merged<D: Device<Memory = Memory>>(
    device: &D,
    instance: &Instance,
    splits: usize,
    flag: bool,
) -> Vec<u32> {
    let (heads, queries, dim) = (3, 2, 64);
    let mut partial_max_sum = numbers(2 * heads * queries * splits, 7);
    for (n, pair) in partial_max_sum.chunks_exact_mut(2).enumerate() {
        pair[1] = pair[1].abs();
        // Parts that hold no key, and a row without any.
        if n % 3 == 1 || n < splits {
            pair.copy_from_slice(&[f32::NEG_INFINITY, 0.0]);
        }
    }
    let memory = [
        numbers(heads * queries * splits * dim, 3),
        partial_max_sum,
        factors(Codec::Tq4, dim),
        numbers(heads, 5),
    ]
    .map(|numbers| Memory::from_slice(&numbers));
    let (mut out, mut lse) =
        (Memory::uninit::<f32>(heads * queries * dim), Memory::uninit::<f32>(heads * queries));
    let params = Merge {
        out: [0, (queries * dim) as u64, dim as u64],
        q_heads: heads as u32,
        queries: queries as u32,
        splits: splits as u32,
        simds: 1,
    };
    merge::Call {
        partial_out: memory[0].view(),
        partial_max_sum: memory[1].view(),
        factors: memory[2].view(),
        sinks: memory[3].view(),
        params,
        out: out.view_mut(),
        lse: lse.view_mut(),
        has_sinks: flag,
        with_lse: true,
        has_shift: false,
        groups: [queries as u32, heads as u32, 1],
    }
    .launch_instance(device, instance)
    .unwrap();
    [bits(&out), bits(&lse)].concat()
}

#[test]
fn merged_parts_are_the_simulators_bit_for_bit() {
    let Some(device) = Metal::find() else { return };
    for instance in [merge::instance::<f32, 64, 0>(), merge::instance::<f32, 64, 1>()] {
        for (splits, flag) in [(1, true), (5, false), (70, true)] {
            let wanted = merged(&Simulator::new(), &instance, splits, flag);
            assert_eq!(merged(&device, &instance, splits, flag), wanted, "{} {splits}", instance.entry());
        }
    }
}

#[test]
fn codes_of_rows_are_those_of_the_cpu() {
    let Some(device) = Metal::find() else { return };
    // Rows in threadgroup memory, and in registers.
    let dims = |codec: &Codec| {
        [80, 128, 256].into_iter().filter(|dim| codec.supports(*dim)).take(2).collect::<Vec<_>>()
    };
    let codecs = Codec::ALL.into_iter().filter(|codec| codec.dtype().is_none());
    let all: Vec<(Codec, usize)> =
        codecs.flat_map(|codec| dims(&codec).into_iter().map(move |dim| (codec, dim))).collect();
    let failed = each(&all, |&(codec, dim)| {
        let case = Rows::new(codec, Side::Keys, dim);
        let generics = encoding::encode_generics(codec, Dtype::F32, dim);
        let instance = encode::encode::specialise(&generics).map_err(|why| why.to_string())?;
        let (mut rng, coder) = (Rng::new(11), Coder::new(codec, dim).unwrap());
        run_on(&device, &instance, &case, &mut |n| {
            vector(&mut rng, &coder, dim, n).iter().map(|x| x * 0.9).collect()
        });
        Ok(())
    });
    assert!(failed.is_empty(), "{failed:?}");
}

fn mask_tiles_of<D: Device<Memory = Memory>>(device: &D, kind: u32) -> Vec<u8> {
    // Blocks that are open, hidden and neither; the last ones of a row and of a column are smaller.
    let (heads, queries, keys) = (2usize, 37usize, 83usize);
    let mut bytes = Vec::new();
    for at in 0..2 * heads * queries * keys {
        let (row, column) = (at / keys % queries, at % keys);
        let hidden =
            (row / 16 + column / 32) % 3 == 1 || (at / (queries * keys) == 1 && column == 40 && row < 20);
        let bias = if hidden { f32::NEG_INFINITY } else { 0.0 };
        match kind {
            0 => bytes.extend(bias.to_le_bytes()),
            1 => bytes.extend(f16::from_f32(bias).to_le_bytes()),
            2 => bytes.extend(bf16::from_f32(bias).to_le_bytes()),
            _ => bytes.push(u8::from(!hidden)),
        }
    }
    let mask = Memory::from_slice(&bytes);
    let params = Mask {
        strides: [heads * queries * keys, queries * keys, keys].map(|n| n as u64),
        step: 1,
        kind,
        heads: heads as u32,
        queries: queries as u32,
        keys: keys as u32,
        rows: 16,
        columns: 32,
        unused: 0,
    };
    let groups = [keys.div_ceil(32), queries.div_ceil(16), 2 * heads].map(|n| n as u32);
    let mut tiles = Memory::uninit::<u8>(groups.iter().map(|n| *n as usize).product());
    mask_tiles::Call { mask: mask.view(), params, mask_tiles: tiles.view_mut(), groups }
        .launch_instance(device, &mask_tiles::instance())
        .unwrap();
    tiles.to_vec::<u8>().unwrap()
}

#[test]
fn classes_of_masks_are_the_simulators() {
    let Some(device) = Metal::find() else { return };
    for kind in 0..4 {
        let wanted = mask_tiles_of(&Simulator::new(), kind);
        assert!([0, 1, 2].iter().all(|tile| wanted.contains(tile)), "{wanted:?}");
        assert_eq!(mask_tiles_of(&device, kind), wanted, "{kind}");
    }
}
