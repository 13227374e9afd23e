//! Devices that tests fill and read.

use flashtile_kernel::cuda::{self, Compiler, Gpu};
use flashtile_kernel::{Device, Scalar, Simulator, View, ViewMut, simulator};

/// The device, if there is one; says so where there is none.
pub(crate) fn gpu() -> Option<Gpu> {
    Gpu::new(0).map_err(|why| println!("SKIPPED, nothing was launched: {why}")).ok()
}

/// The compiler, if there is one; says so where there is none.
pub(crate) fn compiler() -> Option<Compiler> {
    Compiler::load().map_err(|why| println!("SKIPPED, nothing was compiled: {why}")).ok()
}

/// A device of tests: one function runs a kernel on any of them.
pub(crate) trait Host: Device {
    fn memory<T: Scalar>(&self, values: &[T]) -> Self::Memory;
    fn values<T: Scalar>(memory: &Self::Memory) -> Vec<T>;
    fn view(memory: &Self::Memory) -> View<'_, Self::Memory>;
    fn view_mut(memory: &mut Self::Memory) -> ViewMut<'_, Self::Memory>;
}

macro_rules! views {
    ($Memory:ty) => {
        fn view(memory: &$Memory) -> View<'_, $Memory> {
            memory.view()
        }

        fn view_mut(memory: &mut $Memory) -> ViewMut<'_, $Memory> {
            memory.view_mut()
        }
    };
}

impl Host for Simulator {
    fn memory<T: Scalar>(&self, values: &[T]) -> simulator::Memory {
        simulator::Memory::from_slice(values)
    }

    fn values<T: Scalar>(memory: &simulator::Memory) -> Vec<T> {
        memory.to_vec().unwrap()
    }

    views!(simulator::Memory);
}

impl Host for Gpu {
    fn memory<T: Scalar>(&self, values: &[T]) -> cuda::Memory {
        self.buffer_from(values).unwrap()
    }

    fn values<T: Scalar>(memory: &cuda::Memory) -> Vec<T> {
        memory.to_vec().unwrap()
    }

    views!(cuda::Memory);
}
