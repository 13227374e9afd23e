//! Kernels and their instances by names and options.

use crate::failure::{Failure, Result};
use crate::nearest;
use crate::parse::{ByName, codec, count, dtype};
use clap::Args;
use flashtile::kernel::source::GenericKind;
use flashtile::kernel::{Generic, Instance, Kernel, ScalarType};
use flashtile::kernels::{KERNELS, Variant, VariantError, VariantOption, instances};
use flashtile::{Codec, Dtype};

/// Options that select an instance of a kernel.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct VariantArgs {
    /// Elements of a q or k vector
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) head_dim: Option<usize>,
    /// Elements of a v vector; default as many as of k
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) value_dim: Option<usize>,
    /// Element type of q and out
    #[arg(long, value_name = "DTYPE", value_parser = dtype())]
    pub(crate) dtype: Option<Dtype>,
    /// Codec of the keys, as in `flashtile run`; default the dtype
    #[arg(long, value_name = "CODEC", value_parser = codec())]
    pub(crate) k_codec: Option<Codec>,
    /// Codec of the values; default the dtype
    #[arg(long, value_name = "CODEC", value_parser = codec())]
    pub(crate) v_codec: Option<Codec>,
}

impl VariantArgs {
    /// The options that were given.
    pub(crate) fn given(&self) -> Vec<VariantOption> {
        let given = [
            (VariantOption::HeadDim, self.head_dim.is_some()),
            (VariantOption::ValueDim, self.value_dim.is_some()),
            (VariantOption::Dtype, self.dtype.is_some()),
            (VariantOption::KCodec, self.k_codec.is_some()),
            (VariantOption::VCodec, self.v_codec.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(option, _)| option).collect()
    }

    /// The variant to select, with defaults for options that were not given.
    pub(crate) fn variant(&self) -> Variant {
        let dtype = self.dtype.unwrap_or(Dtype::BF16);
        let head_dim = self.head_dim.unwrap_or(128);
        Variant {
            dtype,
            head_dim,
            value_dim: self.value_dim.unwrap_or(head_dim),
            k_codec: self.k_codec.unwrap_or(Codec::of(dtype)),
            v_codec: self.v_codec.unwrap_or(Codec::of(dtype)),
        }
    }
}

/// A parser of names of kernels or their instances. Shells complete the names of kernels.
pub(super) fn kernel_name() -> ByName<String> {
    ByName::new(names(), |text| Ok(text.to_owned()))
}

/// Names of all kernels.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KERNELS.iter().map(|kernel| kernel.name)
}

/// Looks up a kernel by name; `option` is where the name was given.
pub(crate) fn kernel(option: &str, name: &str) -> Result<&'static Kernel> {
    KERNELS.iter().copied().find(|kernel| kernel.name == name).ok_or_else(|| {
        let expected = nearest::expected(name, names());
        Failure::at(option, format_args!("{name} is not a kernel, {expected}"))
    })
}

/// The set of instances that names and options select from.
pub(super) struct Set {
    /// Name of the command, for failures.
    pub(super) command: &'static str,
    /// The instance of a kernel for a variant.
    pub(super) instance_of: fn(&Variant, &Kernel) -> std::result::Result<Instance, VariantError>,
}

impl Set {
    /// The instances that these names select: instances by name, and kernels with the options. An option that concerns
    /// none of the kernels is refused.
    pub(super) fn chosen(&self, options: &VariantArgs, names: &[&str]) -> Result<Vec<Instance>> {
        let named = names.iter().map(|name| self.named(name)).collect::<Result<Vec<_>>>()?;
        let concerns = |option| named.iter().any(|named| named.options().contains(option));
        if let Some(option) = options.given().iter().find(|option| !concerns(option))
            && let Some((named, name)) = named.iter().zip(names).next()
        {
            let what = format_args!("does not apply to {name}, {}", named.expected());
            return Err(Failure::at(format_args!("--{}", option.name()), what));
        }
        let instance = |named: Named| match named {
            Named::Instance(instance) => Ok(instance),
            Named::Kernel(kernel) => {
                (self.instance_of)(&options.variant(), kernel).map_err(|why| Failure::at(kernel.name, why))
            }
        };
        named.into_iter().map(instance).collect()
    }

    /// Looks up a name among kernels and instances.
    fn named(&self, name: &str) -> Result<Named> {
        if let Some(kernel) = KERNELS.iter().find(|kernel| kernel.name == name) {
            return Ok(Named::Kernel(kernel));
        }
        if let Some(instance) = KERNELS.iter().find_map(|kernel| instance(kernel, name)) {
            return Ok(Named::Instance(instance));
        }
        // A kernel's name followed by generics means an instance.
        let of_kernel = |kernel: &&&Kernel| name.starts_with(&format!("{}_", kernel.name));
        let expected = match KERNELS.iter().find(of_kernel) {
            Some(_) => {
                let entries: Vec<String> = instances().iter().map(Instance::entry).collect();
                nearest::expected_some(name, entries.iter().map(String::as_str))
            }
            None => nearest::expected(name, names()),
        };
        let what = format_args!("{name} is neither a kernel nor an instance, {expected}");
        Err(Failure::at(self.command, what))
    }
}

/// A kernel or an instance, as named on the command line.
enum Named {
    Kernel(&'static Kernel),
    Instance(Instance),
}

impl Named {
    /// The options that select among its instances.
    fn options(&self) -> &'static [VariantOption] {
        match self {
            Self::Kernel(kernel) => VariantOption::of(kernel),
            Self::Instance(_) => &[],
        }
    }

    /// Says what to give instead of an option that does not concern it.
    fn expected(&self) -> String {
        let kernel = match self {
            Self::Instance(instance) => {
                return format!("an instance, expected the kernel {}", instance.kernel().name);
            }
            Self::Kernel(kernel) => kernel,
        };
        let names = VariantOption::of(kernel).iter().map(|option| format!("--{}", option.name()));
        match &names.collect::<Vec<_>>()[..] {
            [] => "it has one instance".to_owned(),
            names => format!("expected {}", names.join(", ")),
        }
    }
}

/// Largest value of a generic, which is a dimension, a codec or a small count. Sizes computed from such values do not
/// overflow.
const MAX_GENERIC: u32 = u16::MAX as u32;

/// The instance with a name: one that is listed, or one for another shape or tile.
fn instance(kernel: &'static Kernel, name: &str) -> Option<Instance> {
    let generics = match name.strip_prefix(kernel.cpp)? {
        "" => Vec::new(),
        rest => rest.strip_prefix('_')?.split('_').collect(),
    };
    let kinds = kernel.generics.iter().map(|generic| generic.kind);
    let generics = (generics.len() == kinds.len()).then(|| {
        generics.iter().zip(kinds).map(|(text, kind)| generic(text, kind)).collect::<Option<Vec<_>>>()
    })??;
    // Names spell numbers in one way, which excludes others such as `08`.
    Instance::new(kernel, &generics, None).ok().filter(|instance| instance.entry() == name)
}

/// Parses a generic as it is spelled in names of instances.
fn generic(text: &str, kind: GenericKind) -> Option<Generic> {
    let number = || text.parse::<u32>().ok().filter(|&n| n <= MAX_GENERIC);
    match kind {
        GenericKind::Element => {
            let types = [ScalarType::F32, ScalarType::F16, ScalarType::Bf16];
            types.into_iter().find(|scalar| scalar.name() == text).map(Generic::Type)
        }
        GenericKind::Const(ScalarType::Usize) => number().map(|n| Generic::Usize(n as usize)),
        GenericKind::Const(ScalarType::U32) => number().map(Generic::U32),
        GenericKind::Const(ScalarType::Bool) => text.parse().ok().map(Generic::Bool),
        // No kernel here has other kinds of generics.
        _ => None,
    }
}
