//! Devices that watch the launches of one kernel.

use flashtile_kernel::{Device, DeviceMemory, HostAccess, Launch, Limits, ScalarType, bf16, f16};
use std::cell::{Cell, RefCell};

/// A device that notes the launches of a kernel, and launches nothing else if asked to.
pub(super) struct Watched<'a, D> {
    pub(super) device: &'a D,
    /// The kernel's name.
    kernel: &'static str,
    /// True if launches of other kernels are skipped.
    pub(super) only: Cell<bool>,
    /// The instance that was launched.
    pub(super) entry: RefCell<Option<String>>,
    /// Called after launches of the kernel, with the threads of each.
    after: &'a dyn Fn(u64),
}

impl<'a, D> Watched<'a, D> {
    pub(super) fn new(device: &'a D, kernel: &'static str, after: &'a dyn Fn(u64)) -> Self {
        Self { device, kernel, only: Cell::new(false), entry: RefCell::default(), after }
    }
}

impl<D: Device> Device for &Watched<'_, D> {
    type Memory = D::Memory;
    type Error = D::Error;

    fn limits(&self) -> Limits {
        self.device.limits()
    }

    fn launch(&self, launch: Launch<'_, D::Memory>) -> Result<(), D::Error> {
        let watched = launch.instance().kernel().name == self.kernel;
        if !watched {
            return if self.only.get() { Ok(()) } else { self.device.launch(launch) };
        }
        let groups = launch.groups().iter().map(|&n| u64::from(n)).product::<u64>();
        let threads = groups * u64::from(launch.threads());
        self.entry.borrow_mut().get_or_insert_with(|| launch.instance().entry());
        self.device.launch(launch)?;
        (self.after)(threads);
        Ok(())
    }
}

impl<D: HostAccess> HostAccess for &Watched<'_, D> {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<D::Memory, D::Error> {
        self.device.zeroed(element, len)
    }

    fn uninit(&self, element: ScalarType, len: usize) -> Result<D::Memory, D::Error> {
        self.device.uninit(element, len)
    }

    fn write(&self, memory: &mut D::Memory, at: usize, bytes: &[u8]) -> Result<(), D::Error> {
        self.device.write(memory, at, bytes)
    }

    fn read(&self, memory: &D::Memory, at: usize, bytes: &mut [u8]) -> Result<(), D::Error> {
        self.device.read(memory, at, bytes)
    }
}

fn message(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Memory of a device that holds bytes.
pub(super) fn filled<D: HostAccess>(
    device: &D,
    element: ScalarType,
    bytes: &[u8],
) -> Result<D::Memory, String> {
    let mut memory = device.uninit(element, bytes.len() / element.bytes()).map_err(message)?;
    device.write(&mut memory, 0, bytes).map_err(message)?;
    Ok(memory)
}

/// The contents of memory, after all launched work has ended.
pub(super) fn values<D: HostAccess>(device: &D, memory: &D::Memory) -> Result<Vec<f64>, String> {
    let (element, len) = (memory.view().element(), memory.view().len());
    let mut bytes = vec![0u8; len * element.bytes()];
    device.read(memory, 0, &mut bytes).map_err(message)?;
    let values = match element {
        ScalarType::F32 => bytes.as_chunks().0.iter().map(|x| f64::from(f32::from_ne_bytes(*x))).collect(),
        ScalarType::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_ne_bytes(*x).to_f64()).collect(),
        ScalarType::Bf16 => bytes.as_chunks().0.iter().map(|x| bf16::from_ne_bytes(*x).to_f64()).collect(),
        _ => bytes.iter().map(|x| f64::from(*x)).collect(),
    };
    Ok(values)
}
