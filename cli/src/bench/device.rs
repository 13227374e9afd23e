//! The device that a benchmark runs on.

use super::options::BenchArgs;
use crate::failure::{Failure, Result};
use crate::gpu::{self, Tuning};
use crate::machine::{self, Unit};
use crate::metal::{self, Metal};
use crate::options::{Backend, Kernels};
use crate::report;
use flashtile::cuda::Cuda;
use flashtile::{Cpu, Dtype};

/// The device to measure.
pub(super) enum Device {
    Cpu(Cpu),
    Cuda(Cuda, Tuning),
    Metal(Metal),
}

impl Device {
    /// The unit that computes a dtype.
    pub(super) fn unit(&self, dtype: Dtype) -> Unit {
        match self {
            Self::Cpu(cpu) => {
                Unit::Cpu { isa: cpu.facts().isa.for_dtype(dtype), threads: cpu.facts().threads }
            }
            Self::Cuda(cuda, _) => Unit::Cuda(cuda.clone(), dtype),
            Self::Metal(metal) => Unit::Metal(metal.clone(), dtype),
        }
    }

    pub(super) fn describe(&self) -> String {
        match self {
            Self::Cpu(cpu) => {
                let facts = cpu.facts();
                format!("{}, {}", facts.isa, report::counted(facts.threads, "thread"))
            }
            Self::Cuda(cuda, _) => cuda.name().to_owned(),
            Self::Metal(metal) => metal::name(metal).to_owned(),
        }
    }
}

pub(super) fn device(args: &BenchArgs) -> Result<Device> {
    match args.backend {
        Backend::Auto | Backend::Cpu | Backend::Metal if args.tile.is_some() => {
            Err(Failure::at("--tile", "applies to the cuda backend only"))
        }
        Backend::Auto | Backend::Cpu | Backend::Metal if args.kernels.choice != Kernels::Auto => {
            Err(Failure::at("--kernels", "applies to the cuda backend only"))
        }
        Backend::Auto | Backend::Cpu => Ok(Device::Cpu(machine::cpu(args.cpu)?)),
        Backend::Cuda(_) | Backend::Metal if args.cpu.isa.is_some() => {
            Err(Failure::at("--isa", "applies to the cpu backend only"))
        }
        Backend::Cuda(device) => {
            let tuning = Tuning { kernels: args.kernels.choice, tile: args.tile };
            Ok(Device::Cuda(gpu::device(device)?, tuning))
        }
        Backend::Metal => Ok(Device::Metal(metal::device()?)),
        Backend::Reference | Backend::Simulator => Err(Failure::at(
            "--backend",
            "expected auto, cpu, cuda or metal: other backends are not measured",
        )),
    }
}
