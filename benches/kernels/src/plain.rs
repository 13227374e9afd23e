//! Workloads of kernels that no host code of the library launches: the rotation by itself, and the pre-pass over masks.

use super::data::{Find, Want, fill, random_value, size};
use super::device::{filled, values};
use fastrand::Rng;
use flashtile_core::codec::Codec;
use flashtile_gpu::codecs::factors;
use flashtile_gpu::kernels::mask_tiles::{self as tiling, Mask};
use flashtile_gpu::kernels::rotation::hadamard;
use flashtile_kernel::source::Shape;
use flashtile_kernel::{DeviceMemory, Generic, HostAccess, Instance, ScalarType};
use rayon::prelude::*;

/// A launch with the bytes that it reads.
pub(super) struct Work {
    inputs: Vec<(ScalarType, Vec<u8>)>,
    /// Type and number of the elements that it writes.
    output: (ScalarType, usize),
    instance: Instance,
    launch: Launch,
}

#[derive(Debug, Clone, Copy)]
enum Launch {
    Rotation { rows: u32 },
    MaskTiles { params: Mask, groups: [u32; 3] },
}

/// A [`Work`] whose buffers lie in the memory of a device.
pub(super) struct Placed<D: HostAccess> {
    device: D,
    inputs: Vec<D::Memory>,
    output: D::Memory,
    instance: Instance,
    launch: Launch,
}

impl Work {
    pub(super) fn place<D: HostAccess>(&self, device: D, find: Option<Find>) -> Result<Placed<D>, String> {
        let instance = match find {
            None => self.instance.clone(),
            Some(find) => {
                find(&self.instance).ok_or_else(|| format!("{} has no native code", self.instance.entry()))?
            }
        };
        let inputs = self.inputs.iter().map(|(element, bytes)| filled(&device, *element, bytes));
        Ok(Placed {
            inputs: inputs.collect::<Result<_, _>>()?,
            output: device.uninit(self.output.0, self.output.1).map_err(|e| e.to_string())?,
            instance,
            launch: self.launch,
            device,
        })
    }
}

impl<D: HostAccess> Placed<D> {
    pub(super) fn launch(&mut self) -> Result<(), String> {
        let Self { device, inputs, output, instance, launch } = self;
        let view = |n: usize| inputs[n].view();
        let launched = match *launch {
            Launch::Rotation { rows } => {
                let (out, groups) = (output.view_mut(), [rows.div_ceil(4), 1, 1]);
                let call = hadamard::Call { x: view(0), factors: view(1), out, rows, back: false, groups };
                call.launch_instance(device, instance)
            }
            Launch::MaskTiles { params, groups } => {
                let mask_tiles = output.view_mut();
                let call = tiling::mask_tiles::Call { mask: view(0), params, mask_tiles, groups };
                call.launch_instance(device, instance)
            }
        };
        launched.map_err(|e| e.to_string())
    }

    pub(super) fn answer(&self) -> Result<Vec<f64>, String> {
        values(&self.device, &self.output)
    }
}

fn bytes_of(list: &[f32]) -> (ScalarType, Vec<u8>) {
    (ScalarType::F32, list.iter().flat_map(|x| x.to_ne_bytes()).collect())
}

pub(super) fn rotation(shape: &Shape) -> Result<(Want, Work), String> {
    let (rows, dim) = (size(shape, "rows")?, size(shape, "dim")?);
    if !dim.is_power_of_two() {
        return Err(format!("a rotation of {dim} is not measured"));
    }
    let mut x = vec![0.0f32; rows * dim];
    fill(&mut x, 1, random_value);
    let factors = factors(Codec::Int8, dim);
    let mut want: Vec<f64> =
        x.iter().zip((0..rows).flat_map(|_| &factors[..dim])).map(|(x, sign)| f64::from(x * sign)).collect();
    want.par_chunks_mut(dim).for_each(|row| {
        let mut distance = 1;
        while distance < dim {
            for low in (0..dim).filter(|low| low & distance == 0) {
                let (a, b) = (row[low], row[low + distance]);
                (row[low], row[low + distance]) = (a + b, a - b);
            }
            distance *= 2;
        }
        row.iter_mut().for_each(|x| *x /= (dim as f64).sqrt());
    });
    let instance = hadamard::specialise(&[Generic::Usize(dim)]).map_err(|e| e.to_string())?;
    let work = Work {
        inputs: vec![bytes_of(&x), bytes_of(&factors)],
        output: (ScalarType::F32, rows * dim),
        instance,
        launch: Launch::Rotation { rows: u32::try_from(rows).map_err(|e| e.to_string())? },
    };
    Ok((vec![(0, want)], work))
}

/// Queries and keys of a block of a mask.
const BLOCK: [usize; 2] = [64, 128];

pub(super) fn mask_tiles(shape: &Shape) -> Result<(Want, Work), String> {
    let (queries, keys) = (size(shape, "queries")?, size(shape, "keys")?);
    let blocks = [queries.div_ceil(BLOCK[0]), keys.div_ceil(BLOCK[1])];
    let mut rng = Rng::with_seed(1);
    let tiles: Vec<u8> = (0..blocks[0] * blocks[1]).map(|_| rng.u8(0..3)).collect();
    let mut mask = vec![0u8; queries * keys];
    for (row, bytes) in mask.chunks_exact_mut(keys).enumerate() {
        for (column, keys) in bytes.chunks_mut(BLOCK[1]).enumerate() {
            let tile = tiles[row / BLOCK[0] * blocks[1] + column];
            keys.fill(u8::from(tile == 2));
            // In a block of a partial tile, only the first key of the first query is open.
            if tile == 1 && row.is_multiple_of(BLOCK[0]) {
                keys[0] = 1;
            }
        }
    }
    // A block of one key has nothing else to hide.
    let alone = |n: usize, all: usize, block: usize| all - n * block == 1;
    let want = tiles.iter().enumerate().map(|(n, &tile)| {
        let (row, column) = (n / blocks[1], n % blocks[1]);
        let open = tile == 1 && alone(row, queries, BLOCK[0]) && alone(column, keys, BLOCK[1]);
        if open { 2.0 } else { f64::from(tile) }
    });
    let count = |n: usize| u32::try_from(n).map_err(|e| e.to_string());
    let params = Mask {
        strides: [0, 0, keys as u64],
        step: 1,
        kind: 3,
        heads: 1,
        queries: count(queries)?,
        keys: count(keys)?,
        rows: BLOCK[0] as u32,
        columns: BLOCK[1] as u32,
        unused: 0,
    };
    let work = Work {
        inputs: vec![(ScalarType::U8, mask)],
        output: (ScalarType::U8, tiles.len()),
        instance: tiling::mask_tiles::specialise(&[]).map_err(|e| e.to_string())?,
        launch: Launch::MaskTiles { params, groups: [count(blocks[1])?, count(blocks[0])?, 1] },
    };
    Ok((vec![(0, want.collect())], work))
}
