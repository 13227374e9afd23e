//! Storage on CUDA devices, and their streams.

#![allow(unsafe_code, reason = "flashtile takes device memory by its address")]

use crate::gpu::GpuStorage;
use crate::storage::refused;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaDevice, CudaStorage, Result, Storage, bail};
use flashtile::cuda::cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop};
use flashtile::cuda::{CudaEngine, Gpu, Memory, ScalarType, Session, with_session};

impl GpuStorage for CudaStorage {
    type Engine = CudaEngine;
    /// Before a launch uses memory, its stream waits for writes of other streams; afterwards, other streams wait for the launch.
    type Guard<'a> = SyncOnDrop<'a>;

    fn with_session<T>(device: &CudaDevice, run: impl FnOnce(&mut Session, &Gpu) -> Result<T>) -> Result<T> {
        let stream = device.cuda_stream();
        let with = |session: &mut Session| {
            let on = session.device().on(&stream);
            run(session, &on)
        };
        with_session(&stream, with).map_err(refused)?
    }

    /// The session already launches on the device's stream.
    fn launch(
        session: &mut Session,
        _: &CudaDevice,
        run: impl FnOnce(&mut Session) -> Result<()>,
    ) -> Result<()> {
        run(session)
    }

    fn lend<'a>(&'a self, on: &'a Gpu) -> Result<(Memory, SyncOnDrop<'a>)> {
        match &self.slice {
            CudaStorageSlice::U8(slice) => Ok(read(slice, on)),
            CudaStorageSlice::F32(slice) => Ok(read(slice, on)),
            CudaStorageSlice::F16(slice) => Ok(read(slice, on)),
            CudaStorageSlice::BF16(slice) => Ok(read(slice, on)),
            _ => bail!("its elements are not U8, F32, F16 or BF16"),
        }
    }

    fn lend_mut<'a>(&'a mut self, on: &'a Gpu) -> Result<(Memory, SyncOnDrop<'a>)> {
        match &mut self.slice {
            CudaStorageSlice::F32(slice) => Ok(write(slice, on)),
            CudaStorageSlice::F16(slice) => Ok(write(slice, on)),
            CudaStorageSlice::BF16(slice) => Ok(write(slice, on)),
            _ => bail!("its elements are not F32, F16 or BF16"),
        }
    }

    fn into_storage(self) -> Storage {
        Storage::Cuda(self)
    }
}

fn read<'a, T: DeviceRepr>(slice: &'a CudaSlice<T>, on: &'a Gpu) -> (Memory, SyncOnDrop<'a>) {
    let (at, used) = slice.device_ptr(on.stream());
    // SAFETY: the slice has these bytes. candle frees them on its stream, after the work queued there, and keeps the tensor locked against
    // writing until the launches are queued; later writes follow on the stream, or wait for the event that `used` records on it.
    let memory = unsafe { on.borrow(ScalarType::U8, at, slice.num_bytes()) };
    (memory, used)
}

fn write<'a, T: DeviceRepr>(slice: &'a mut CudaSlice<T>, on: &'a Gpu) -> (Memory, SyncOnDrop<'a>) {
    let bytes = slice.num_bytes();
    let (at, used) = slice.device_ptr_mut(on.stream());
    // SAFETY: the slice has these bytes, and nothing else refers to it until the launches are on the stream; later work follows there, or
    // waits for the event that `used` records.
    let memory = unsafe { on.borrow(ScalarType::U8, at, bytes) };
    (memory, used)
}
