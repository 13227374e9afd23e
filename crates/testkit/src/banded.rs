//! Device memory between bands that nothing may touch.

#![allow(unsafe_code)]

#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
use super::padding::{held, padding};
use flashtile_core::inputs::Inputs;
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
use flashtile_core::problem::Problem;
#[cfg(feature = "cuda")]
use flashtile_gpu::upload::Results;
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
use flashtile_gpu::upload::Uploaded;
use flashtile_kernel::{Device, DeviceMemory, HostAccess, Launch, Limits, ScalarType};
use std::sync::{Mutex, PoisonError};

/// A device that lends a part of its memory.
pub(crate) trait Lends: HostAccess {
    /// `len` elements from byte `at` of a memory of bytes on.
    ///
    /// # Safety
    /// `memory` lives as long as the part, and nothing but work of the device accesses the part meanwhile.
    unsafe fn part(
        &self,
        memory: &Self::Memory,
        at: usize,
        element: ScalarType,
        len: usize,
    ) -> Result<Self::Memory, Self::Error>;
}

#[cfg(feature = "cuda")]
impl Lends for flashtile_cuda::Gpu {
    unsafe fn part(
        &self,
        memory: &Self::Memory,
        at: usize,
        element: ScalarType,
        len: usize,
    ) -> Result<Self::Memory, Self::Error> {
        // SAFETY: the caller's contract.
        Ok(unsafe { self.borrow(element, memory.address() + at as u64, len) })
    }
}

#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
impl Lends for flashtile_metal::Gpu {
    unsafe fn part(
        &self,
        memory: &Self::Memory,
        at: usize,
        element: ScalarType,
        len: usize,
    ) -> Result<Self::Memory, Self::Error> {
        // SAFETY: the caller's contract.
        unsafe { self.borrow(memory.buffer().clone(), at, element, len) }
    }
}

/// Bytes before and after a tensor.
const BAND: usize = 256;

/// The byte of bands, and of memory that nothing has written: NaN in every dtype.
pub(crate) const FILL: u8 = 0xFF;

/// A device whose memory lies between bands.
pub(crate) struct Banded<D: HostAccess> {
    device: D,
    /// Bytes beyond a multiple of 256 at which tensors of bytes start: 0, or 2 or 4, the largest size of an element
    /// or scale in them. If it is not 0, other tensors start at an odd element.
    lead: usize,
    /// True if allocations end where the tensors do, for memory checkers.
    exact: bool,
    bands: Mutex<Vec<Band<D::Memory>>>,
}

/// A tensor's bytes in a memory, and the bands around them.
struct Band<M> {
    memory: M,
    start: usize,
    end: usize,
}

impl<D: Lends> Banded<D> {
    /// A device for inputs, whose tensors start at odd elements where that is asked for.
    pub(crate) fn new(device: D, inputs: &Inputs<'_>, is_odd: bool, exact: bool) -> Self {
        let masks = inputs.mask.iter().map(|mask| mask.kind().bytes());
        let elements = masks.chain([inputs.k.codec().alignment(), inputs.v.codec().alignment()]);
        let lead = if is_odd { elements.max().unwrap_or(4) } else { 0 };
        Self { device, lead, exact, bands: Mutex::default() }
    }

    /// The first byte outside of tensors that has changed.
    pub(crate) fn touched(&self) -> Result<Option<usize>, D::Error> {
        for band in self.bands.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let mut bytes = vec![0u8; band.memory.view().len()];
            self.device.read(&band.memory, 0, &mut bytes)?;
            let outside = |at: &usize| *at < band.start || *at >= band.end;
            if let Some(at) = (0..bytes.len()).filter(outside).find(|&at| bytes[at] != FILL) {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// The first byte between the rows of `out` that has changed.
    #[cfg(feature = "cuda")]
    pub(crate) fn touched_gap(&self, results: &Results<D::Memory>) -> Result<Option<usize>, D::Error> {
        let gaps = results.gaps();
        let Some(last) = gaps.last() else { return Ok(None) };
        let mut bytes = vec![0u8; last + 1];
        self.device.read(results.memories().0, 0, &mut bytes)?;
        Ok(gaps.into_iter().find(|&at| bytes[at] != FILL))
    }

    /// Makes the rows of keys and values that hold no token of the problem NaN.
    #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_standin)))]
    pub(crate) fn poison_padding(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        uploaded: &mut Uploaded<D::Memory>,
    ) -> Result<(), D::Error> {
        let strides = [uploaded.inputs().k.strides, uploaded.inputs().v.strides];
        let held = held(problem, inputs);
        let views = [&inputs.k, &inputs.v];
        for ((memory, strides), view) in uploaded.kv_mut().into_iter().zip(strides).zip(views) {
            let mut bytes = vec![0u8; memory.view().len() * memory.view().element().bytes()];
            self.read(memory, 0, &mut bytes)?;
            padding(view, strides, &held).into_iter().for_each(|unused| bytes[unused].fill(FILL));
            self.write(memory, 0, &bytes)?;
        }
        Ok(())
    }
}

impl<D: Lends> Device for Banded<D> {
    type Memory = D::Memory;
    type Error = D::Error;

    fn limits(&self) -> Limits {
        self.device.limits()
    }

    fn launch(&self, launch: Launch<'_, D::Memory>) -> Result<(), D::Error> {
        self.device.launch(launch)
    }
}

impl<D: Lends> HostAccess for Banded<D> {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<D::Memory, D::Error> {
        let mut memory = self.uninit(element, len)?;
        self.write(&mut memory, 0, &vec![0; len * element.bytes()])?;
        Ok(memory)
    }

    /// Elements of NaN.
    fn uninit(&self, element: ScalarType, len: usize) -> Result<D::Memory, D::Error> {
        let (size, bytes) = (element.bytes(), len * element.bytes());
        let start = BAND + if size == 1 || self.lead == 0 { self.lead } else { size };
        let all = vec![FILL; start + bytes + if self.exact { 0 } else { BAND }];
        let mut memory = self.device.uninit(ScalarType::U8, all.len())?;
        self.device.write(&mut memory, 0, &all)?;
        // SAFETY: the device keeps the memory, and only runs, which follow each other, access the elements.
        let part = unsafe { self.device.part(&memory, start, element, len) }?;
        let band = Band { memory, start, end: start + bytes };
        self.bands.lock().unwrap_or_else(PoisonError::into_inner).push(band);
        Ok(part)
    }

    fn write(&self, memory: &mut D::Memory, at: usize, bytes: &[u8]) -> Result<(), D::Error> {
        self.device.write(memory, at, bytes)
    }

    fn read(&self, memory: &D::Memory, at: usize, bytes: &mut [u8]) -> Result<(), D::Error> {
        self.device.read(memory, at, bytes)
    }
}
