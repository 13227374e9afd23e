//! Claims of DLPack capsules and `__array_interface__`, true or not, are refused or read as they say, and no
//! byte beside them is read.

#![no_main]
#![allow(dead_code)]

#[path = "../../python/src/memory/block.rs"]
mod block;
#[path = "../../python/src/memory/dlpack.rs"]
mod dlpack;
#[path = "../../python/src/memory/host.rs"]
mod host;

use block::{ArrayInterface, Axes, Block, Described, Kind, Refusal};
use dlpack::{DlTensor, DlVersioned, Managed};
use flashtile::{Attention, Cpu, Dtype, Outputs, Runner, TensorView, TensorViewMut};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use std::alloc::Layout;
use std::ptr::NonNull;

/// Claims of more bytes have no memory behind them: they are described and refused, or described alone.
const MAX_BYTES: i128 = 4096;

/// Elements that are read and written one by one, of tensors that repeat theirs.
const MAX_ELEMENTS: usize = 4096;

/// The claims of a producer about its memory.
#[derive(Debug)]
struct Claim {
    shape: Vec<i64>,
    /// In elements.
    strides: Option<Vec<i64>>,
    element: i128,
    readonly: bool,
    /// Bytes that the storage is said to have.
    available: Option<usize>,
}

impl Claim {
    fn new(u: &mut Unstructured<'_>, element: usize) -> Result<Self> {
        let rank = if u.ratio(1, 16)? { u.int_in_range(0..=70)? } else { u.int_in_range(0..=5)? };
        let size =
            |u: &mut Unstructured<'_>| if u.ratio(1, 32)? { u.arbitrary() } else { u.int_in_range(0..=5) };
        let shape: Vec<i64> = (0..rank).map(|_| size(u)).collect::<Result<_>>()?;
        let wild = u.ratio(1, 8)?;
        let mut dense = 1i64;
        let mut strides = vec![0; rank];
        for (stride, n) in strides.iter_mut().zip(&shape).rev() {
            *stride = match u.int_in_range(0..=7)? {
                0 => 0,
                1 if wild => u.arbitrary()?,
                2 if wild => u.int_in_range(-9..=9)?,
                3 => dense.saturating_add(u.int_in_range(0..=9)?),
                _ => dense,
            };
            dense = stride.saturating_mul((*n).max(1));
        }
        let strides = if u.ratio(1, 4)? { None } else { Some(strides) };
        let available = if u.ratio(1, 4)? { Some(u.int_in_range(0..=128)?) } else { None };
        Ok(Self { shape, strides, element: element as i128, readonly: u.ratio(1, 8)?, available })
    }

    /// Strides of every axis, dense where none are said. `None` where they overflow.
    fn all_strides(&self) -> Option<Vec<i128>> {
        if let Some(strides) = &self.strides {
            return Some(strides.iter().map(|&stride| i128::from(stride)).collect());
        }
        let mut next = 1i128;
        let mut strides = vec![0; self.shape.len()];
        for (stride, n) in strides.iter_mut().zip(&self.shape).rev() {
            *stride = next;
            next = next.checked_mul(i128::from(*n))?;
        }
        Some(strides)
    }

    /// First and last element that the shape reaches; `None` where there are none, or their places overflow.
    fn reach(&self) -> Option<(i128, i128)> {
        if self.shape.iter().any(|&n| n <= 0) {
            return None;
        }
        self.shape.iter().zip(self.all_strides()?).try_fold((0i128, 0i128), |(first, last), (&n, stride)| {
            let far = (i128::from(n) - 1).checked_mul(stride)?;
            Some((first.checked_add(far.min(0))?, last.checked_add(far.max(0))?))
        })
    }
}

/// Memory of a claim, to the byte.
struct Backing {
    base: *mut u8,
    layout: Layout,
    /// Bytes before the first element.
    before: usize,
}

impl Backing {
    /// The memory of a claim that is small enough; `odd` misaligns it.
    fn new(claim: &Claim, odd: bool) -> Option<Self> {
        let (first, last) = claim.reach()?;
        let bytes = (last - first + 1).checked_mul(claim.element).filter(|&bytes| bytes <= MAX_BYTES)?;
        let layout = Layout::from_size_align(bytes as usize + usize::from(odd), 16).ok()?;
        // SAFETY: the size is not 0.
        let base = unsafe { std::alloc::alloc(layout) };
        assert!(!base.is_null());
        for byte in 0..layout.size() {
            // SAFETY: in the allocation. Bytes that no f16, bf16 or f32 takes for NaN.
            unsafe { *base.add(byte) = (byte % 61) as u8 };
        }
        Some(Self { base, layout, before: (-first * claim.element) as usize + usize::from(odd) })
    }

    fn first(&self) -> *mut u8 {
        self.base.wrapping_add(self.before)
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // SAFETY: of this layout, from `new`.
        unsafe { std::alloc::dealloc(self.base, self.layout) }
    }
}

/// An address without memory.
fn nowhere(u: &mut Unstructured<'_>) -> Result<*mut u8> {
    let at = *u.choose(&[0usize, 1, 64, 4096, usize::MAX - 63, usize::MAX])?;
    Ok(std::ptr::without_provenance_mut(at))
}

fn capsule(u: &mut Unstructured<'_>) -> Result<()> {
    let valid = [(2u8, 32u8, 1u16), (2, 16, 1), (4, 16, 1), (6, 8, 1)];
    let (code, bits, lanes) = if u.ratio(1, 8)? { u.arbitrary()? } else { *u.choose(&valid)? };
    let mut claim = Claim::new(u, usize::from(bits / 8).max(1))?;
    let backing = Backing::new(&claim, u.ratio(1, 16)?);
    let data = match &backing {
        Some(backing) => backing.first(),
        None => nowhere(u)?,
    };
    let byte_offset = match u.int_in_range(0..=15)? {
        0 if backing.is_none() => u.arbitrary()?,
        1 => u.int_in_range(0..=64)?,
        _ => 0u64,
    };
    // Without memory, an axis may be missing from the numbers: their count is out of range then, or their address null.
    let (lost, count) = (u.ratio(1, 16)?, u.arbitrary::<i32>()?);
    let lost = lost && !(1..=block::MAX_RANK as i32).contains(&count);
    let tensor = DlTensor {
        data: if backing.is_some() { data.wrapping_sub(byte_offset as usize) } else { data }.cast(),
        device_type: dlpack::CPU,
        device_id: 0,
        ndim: if lost { count } else { claim.shape.len() as i32 },
        code,
        bits,
        lanes,
        shape: if u.ratio(1, 32)? { std::ptr::null() } else { claim.shape.as_ptr() },
        strides: claim.strides.as_ref().map_or(std::ptr::null(), |strides| strides.as_ptr()),
        byte_offset,
    };
    let mut versioned = DlVersioned {
        major: if u.ratio(1, 16)? { u.arbitrary()? } else { 1 },
        minor: 0,
        context: std::ptr::null_mut(),
        deleter: None,
        flags: u64::from(claim.readonly),
        tensor,
    };
    let is_versioned = u.arbitrary()?;
    // A capsule without a version says nothing of writes.
    claim.readonly &= is_versioned;
    let managed = match is_versioned {
        true => Managed::Versioned(NonNull::from(&mut versioned)),
        false => Managed::Plain(NonNull::from(&mut versioned.tensor)),
    };
    // SAFETY: a tensor and a versioned tensor.
    let Ok((tensor, readonly)) = (unsafe { managed.tensor() }) else { return Ok(()) };
    assert_eq!(tensor.device(), (dlpack::CPU, 0));
    // SAFETY: `ndim` numbers, or a count that is refused before they are read.
    let described = unsafe { tensor.described("q", readonly) };
    if !lost {
        drive(&claim, described, backing.as_ref());
    }
    Ok(())
}

fn array(u: &mut Unstructured<'_>) -> Result<()> {
    let valid = [("<f4", 4usize), ("<f2", 2), ("|b1", 1), ("<V2", 2), ("|V2", 2)];
    let (mut typestr, element) = *u.choose(&valid)?;
    let claim = Claim::new(u, element)?;
    let backing = Backing::new(&claim, u.ratio(1, 16)?);
    let first = match &backing {
        Some(backing) => backing.first(),
        None => nowhere(u)?,
    };
    let Ok(shape) = claim.shape.iter().map(|&n| usize::try_from(n)).collect() else { return Ok(()) };
    let mut strides: Option<Vec<isize>> = claim.strides.as_ref().map(|strides| {
        strides.iter().map(|&stride| (stride as isize).saturating_mul(element as isize)).collect()
    });
    // A description that is not the claim's is not driven: reading it may be refused, and must not panic.
    let mut true_to_claim = strides.iter().flatten().all(|stride| stride.unsigned_abs() < usize::MAX / 16);
    let text = u.ratio(1, 8)?;
    if u.ratio(1, 16)? {
        strides.get_or_insert_default().push(u.arbitrary()?);
        true_to_claim = false;
    }
    if text {
        let len = u.int_in_range(0..=6)?;
        typestr = std::str::from_utf8(u.bytes(len)?).unwrap_or("\u{3c0}f4");
        true_to_claim = false;
    }
    let dtype = Some("bfloat16").filter(|_| typestr.ends_with('2') || text);
    let address = first.expose_provenance();
    let interface = ArrayInterface { address, readonly: claim.readonly, shape, strides, typestr, dtype };
    let described = interface.described("q");
    if true_to_claim {
        drive(&claim, described, backing.as_ref());
    }
    Ok(())
}

/// Checks what is accepted against the claim, and reads and writes all of it where there is memory.
fn drive(claim: &Claim, described: std::result::Result<Described, Refusal>, backing: Option<&Backing>) {
    let Ok(described) = described else { return };
    let kind = described.kind;
    let Ok(mut block) = Block::new("q", described, claim.available) else { return };
    let empty = claim.shape.contains(&0);
    let span = match claim.reach() {
        _ if empty => 0,
        Some((first, last)) => {
            assert_eq!(first, 0, "elements before the first were accepted");
            last + 1
        }
        None => panic!("a shape that overflows was accepted: {claim:?}"),
    };
    assert_eq!(block.span() as i128, span, "{claim:?}");
    let addresses = block.addresses();
    assert_eq!((addresses.end - addresses.start) as i128, span * kind.bytes() as i128);
    assert!(empty || addresses.start != 0);
    assert!(claim.available.is_none_or(|available| addresses.len() <= available));
    assert_eq!(block.check_exclusive(&[]).is_err(), claim.readonly);
    assert!(empty || block.check_exclusive(&[&block]).is_err());
    if backing.is_some() || empty {
        // SAFETY: the memory of the claim is alive, and used by nothing else.
        unsafe { read(&block) };
        // SAFETY: the same.
        unsafe { write(&mut block, claim.readonly) };
    }
}

/// Reads every element by each view.
///
/// # Safety
/// The memory of the block is alive, and written by nobody.
unsafe fn read(block: &Block) {
    for axes in [Axes::Bhsd, Axes::Bshd, Axes::Packed] {
        // SAFETY: the caller's contract.
        let Ok(view) = (unsafe { block.view(axes) }) else { continue };
        elements(view.shape(), |index| assert!(!view.get(index).is_nan()));
        attend(view);
    }
    // SAFETY: the caller's contract.
    if let Ok(mask) = unsafe { block.mask() }
        && let [.., q, k] = block.shape[..]
        && block.shape.len() == 4
    {
        elements([block.shape[0], block.shape[1], q, k], |index| assert!(!mask.bias(index).is_nan()));
    }
}

/// Writes every element by each view.
///
/// # Safety
/// The memory of the block is alive, and used by nobody.
unsafe fn write(block: &mut Block, readonly: bool) {
    for axes in [Axes::Bhsd, Axes::Bshd, Axes::Packed] {
        // SAFETY: the caller's contract.
        let Ok(mut view) = (unsafe { block.view_mut(axes, &[]) }) else { continue };
        assert!(!readonly);
        let [b, h, s, dim] = view.shape();
        if dim > 0 {
            elements([b, h, s, 1], |[b, h, row, _]| view.row_bytes_mut([b, h, row]).fill(7));
        }
    }
    let is_f32 = block.kind == Kind::Element(Dtype::F32);
    // SAFETY: the caller's contract.
    if let Ok(list) = unsafe { block.list_mut(&[]) } {
        assert!(!readonly && is_f32);
        list.fill(0.5);
    }
}

/// Attention of a tensor to itself, by the kernels.
fn attend(view: TensorView<'_>) {
    let shape = view.shape();
    // Axes may be of any size where another is empty, or where they repeat one element.
    if !(1..=MAX_ELEMENTS).contains(&count(shape)) {
        return;
    }
    let mut out = vec![0u8; shape.iter().product::<usize>() * view.dtype().bytes()];
    let Ok(out) = TensorViewMut::from_bytes(view.dtype(), &mut out, shape, dense(shape)) else { return };
    let options = Attention::full();
    let (desc, inputs) = (options.desc(&view, &view, &view), options.inputs(view, view, view));
    // Some shapes are no problem, and are refused.
    let _ = Runner::with_cpu(Cpu::new().with_threads(1)).run(&desc, &inputs, &mut Outputs::new(out));
}

/// Strides of a dense tensor.
const fn dense([_, d1, d2, d3]: [usize; 4]) -> [usize; 4] {
    [d1 * d2 * d3, d2 * d3, d3, 1]
}

/// Elements of a shape, of which some may be at the same address.
fn count(shape: [usize; 4]) -> usize {
    if shape.contains(&0) { 0 } else { shape.iter().fold(1, |count, n| count.saturating_mul(*n)) }
}

/// Calls `f` with the first [`MAX_ELEMENTS`] indices, and the last.
fn elements(shape: [usize; 4], mut f: impl FnMut([usize; 4])) {
    let count = count(shape);
    let [_, d1, d2, d3] = shape;
    for n in 0..count.min(MAX_ELEMENTS) {
        let (rows, planes) = (n / d3, n / d3 / d2);
        f([planes / d1, planes % d1, rows % d2, n % d3]);
    }
    if count > 0 {
        f(shape.map(|n| n - 1));
    }
}

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    // Bytes that end early describe nothing.
    let _ = match u.arbitrary() {
        Ok(true) => capsule(&mut u),
        Ok(false) => array(&mut u),
        Err(_) => return,
    };
});
