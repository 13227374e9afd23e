//! A Llama from a GGUF file. candle multiplies by the quantized matrices; attention is a function of the caller, so that the model knows
//! nothing of caches: `|layer, q, k, v| step.attend(layer, q, k, v)` attends over flashtile's.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{Device, Error, Module, Result, Tensor, bail};
use candle_nn::RmsNorm;
use candle_nn::rotary_emb::rope_i;
use flashtile_candle::flashtile::CacheShape;
use std::collections::HashMap;
use std::io::{Read, Seek};

/// The value of a key of the metadata.
pub fn value<'a>(metadata: &'a HashMap<String, Value>, key: &str) -> Result<&'a Value> {
    metadata.get(key).ok_or_else(|| Error::msg(format!("the model's file has no {key}")))
}

/// Dimensions and constants of a model.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    /// Tokens that the model was trained to see.
    pub context: usize,
    pub rms_eps: f64,
    pub rope_base: f32,
}

impl Config {
    /// Reads the metadata of a Llama, and refuses models that [`Model`] would compute wrongly.
    pub fn read(metadata: &HashMap<String, Value>) -> Result<Self> {
        let architecture = value(metadata, "general.architecture")?.to_string()?;
        if architecture != "llama" {
            bail!("the model's architecture is {architecture}, expected llama")
        }
        if let Some(key) = metadata.keys().find(|key| key.starts_with("llama.rope.scaling.")) {
            bail!("the model has {key}, which this program does not compute")
        }
        let count = |key: &str| Ok::<_, Error>(value(metadata, key)?.to_u64()? as usize);
        let config = Self {
            layers: count("llama.block_count")?,
            heads: count("llama.attention.head_count")?,
            kv_heads: count("llama.attention.head_count_kv")?,
            head_dim: count("llama.rope.dimension_count")?,
            hidden: count("llama.embedding_length")?,
            context: count("llama.context_length")?,
            rms_eps: f64::from(value(metadata, "llama.attention.layer_norm_rms_epsilon")?.to_f32()?),
            rope_base: value(metadata, "llama.rope.freq_base")?.to_f32()?,
        };
        if config.heads * config.head_dim != config.hidden {
            bail!(
                "{} heads of {} rotated elements do not make {}: all of a head has to be rotated",
                config.heads,
                config.head_dim,
                config.hidden
            )
        }
        Ok(config)
    }

    /// The shape of a cache for the model.
    pub fn cache_shape(&self) -> CacheShape {
        let Self { layers, kv_heads, head_dim, .. } = *self;
        CacheShape { layers, kv_heads, head_dim, value_dim: head_dim }
    }
}

/// The tensors of a GGUF file, read one at a time.
pub struct Tensors<'a, R> {
    pub content: &'a Content,
    pub file: R,
    /// True for matrices of F32, whose products do not round activations to 8 bits.
    pub f32: bool,
    /// Called after each tensor.
    pub progress: &'a dyn Fn(),
}

impl<R: Read + Seek> Tensors<'_, R> {
    fn read(&mut self, name: &str) -> Result<QTensor> {
        let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu)?;
        (self.progress)();
        Ok(tensor)
    }

    /// A matrix to multiply by. Q4_1 becomes Q8_0: candle multiplies by the latter with SIMD instructions, many times as fast, and its rounding
    /// is small beside that of 4 bits.
    fn matrix(&mut self, name: &str) -> Result<QMatMul> {
        let matrix = self.read(name)?;
        let elements = || matrix.dequantize(&Device::Cpu);
        match matrix.dtype() {
            _ if self.f32 => Ok(QMatMul::Tensor(elements()?)),
            GgmlDType::Q4_1 => QMatMul::from_qtensor(QTensor::quantize(&elements()?, GgmlDType::Q8_0)?),
            _ => QMatMul::from_qtensor(matrix),
        }
    }

    fn norm(&mut self, name: &str, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm::new(self.read(name)?.dequantize(&Device::Cpu)?, eps))
    }
}

/// Sines and cosines of positions.
struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// The table of all positions, `(context, head_dim / 2)`.
    fn new(config: &Config) -> Result<Self> {
        let half = config.head_dim / 2;
        let frequency = |i| config.rope_base.powf(-(i as f32) / half as f32);
        let frequencies = Tensor::from_iter((0..half).map(frequency), &Device::Cpu)?.unsqueeze(0)?;
        let positions = Tensor::arange(0f32, config.context as f32, &Device::Cpu)?.unsqueeze(1)?;
        let angles = positions.matmul(&frequencies)?;
        Ok(Self { cos: angles.cos()?, sin: angles.sin()? })
    }

    /// The rows of positions, `(tokens, 1, head_dim / 2)`.
    fn at(&self, positions: &[u32]) -> Result<Self> {
        let positions = Tensor::new(positions, &Device::Cpu)?;
        let rows = |table: &Tensor| table.index_select(&positions, 0)?.unsqueeze(1);
        Ok(Self { cos: rows(&self.cos)?, sin: rows(&self.sin)? })
    }

    /// Rotates `(tokens, heads, head_dim)`, each token by its position. Pairs are neighbors: GGUF files have the rows of Llama's q and k in
    /// this order.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let (tokens, heads, dim) = x.dims3()?;
        // candle rotates (batch, heads, tokens, dim), and takes other angles for each batch entry: each token is one.
        rope_i(&x.unsqueeze(2)?, &self.cos, &self.sin)?.reshape((tokens, heads, dim))
    }
}

struct Layer {
    attention_norm: RmsNorm,
    query: QMatMul,
    key: QMatMul,
    value: QMatMul,
    output: QMatMul,
    inner_norm: RmsNorm,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
}

impl Layer {
    fn read<R: Read + Seek>(tensors: &mut Tensors<'_, R>, layer: usize, eps: f64) -> Result<Self> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        Ok(Self {
            attention_norm: tensors.norm(&name("attn_norm"), eps)?,
            query: tensors.matrix(&name("attn_q"))?,
            key: tensors.matrix(&name("attn_k"))?,
            value: tensors.matrix(&name("attn_v"))?,
            output: tensors.matrix(&name("attn_output"))?,
            inner_norm: tensors.norm(&name("ffn_norm"), eps)?,
            gate: tensors.matrix(&name("ffn_gate"))?,
            up: tensors.matrix(&name("ffn_up"))?,
            down: tensors.matrix(&name("ffn_down"))?,
        })
    }

    /// `x` `(tokens, hidden)` after the layer. `attend` takes q, k and v as `(tokens, heads, head_dim)`.
    fn forward(
        &self,
        x: &Tensor,
        rope: &Rope,
        head_dim: usize,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (tokens, hidden) = x.dims2()?;
        let normed = self.attention_norm.forward(x)?;
        let heads = |matrix: &QMatMul| matrix.forward(&normed)?.reshape((tokens, (), head_dim));
        let (q, k, v) = (heads(&self.query)?, heads(&self.key)?, heads(&self.value)?);
        let attended = attend(&rope.rotate(&q)?, &rope.rotate(&k)?, &v)?;
        let x = (x + self.output.forward(&attended.reshape((tokens, hidden))?)?)?;
        let normed = self.inner_norm.forward(&x)?;
        let inner = (self.gate.forward(&normed)?.silu()? * self.up.forward(&normed)?)?;
        x + self.down.forward(&inner)?
    }
}

/// A Llama.
pub struct Model {
    config: Config,
    /// Rows of tokens, and the matrix of the logits unless the file has another.
    embeddings: QMatMul,
    rope: Rope,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Option<QMatMul>,
}

impl Model {
    /// Reads the tensors of a file.
    pub fn read<R: Read + Seek>(mut tensors: Tensors<'_, R>) -> Result<Self> {
        let content = tensors.content;
        let config = Config::read(&content.metadata)?;
        let has = |name| content.tensor_infos.contains_key(name);
        if has("rope_freqs.weight") {
            bail!("the model scales the frequencies of its positions, which this program does not compute")
        }
        let layer = |n| Layer::read(&mut tensors, n, config.rms_eps);
        Ok(Self {
            config,
            rope: Rope::new(&config)?,
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            embeddings: tensors.matrix("token_embd.weight")?,
            norm: tensors.norm("output_norm.weight", config.rms_eps)?,
            head: has("output.weight").then(|| tensors.matrix("output.weight")).transpose()?,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The last hidden states `(tokens, hidden)` of tokens at positions. `attend` is called with each layer in turn, and its q, k and v
    /// `(tokens, heads, head_dim)`; it stores k and v and attends to them and to the rows of earlier calls.
    pub fn forward(
        &self,
        tokens: &[u32],
        positions: &[u32],
        mut attend: impl FnMut(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let rope = self.rope.at(positions)?;
        let mut x = self.embeddings.embedding(&Tensor::new(tokens, &Device::Cpu)?)?;
        for (n, layer) in self.layers.iter().enumerate() {
            x = layer.forward(&x, &rope, self.config.head_dim, |q, k, v| attend(n, q, k, v))?;
        }
        self.norm.forward(&x)
    }

    /// The logits `(tokens, vocabulary)` of hidden states.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        self.head.as_ref().unwrap_or(&self.embeddings).forward(hidden)
    }
}
