//! BERT over packed tokens, with flashtile's attention: `(tokens, hidden)` from the first layer to the last, so that batches of texts of
//! different lengths have no padding.

use candle_core::{Result, Tensor};
use candle_nn::{Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear};
use candle_transformers::models::bert::Config;
use flashtile_candle::flash_attn_varlen;

/// Texts, one after another.
pub struct Packed {
    /// Token ids.
    pub ids: Tensor,
    /// Position of each token in its text.
    pub positions: Tensor,
    /// Where each text starts, then the number of tokens.
    pub cu_seqlens: Tensor,
    /// Tokens of the longest text.
    pub longest: usize,
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    output_norm: LayerNorm,
    up: Linear,
    down: Linear,
    down_norm: LayerNorm,
    heads: usize,
}

impl Layer {
    fn load(vb: &VarBuilder, config: &Config) -> Result<Self> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let attention = vb.pp("attention");
        let project = |name: &str| linear(hidden, hidden, attention.pp("self").pp(name));
        Ok(Self {
            query: project("query")?,
            key: project("key")?,
            value: project("value")?,
            output: linear(hidden, hidden, attention.pp("output.dense"))?,
            output_norm: layer_norm(hidden, eps, attention.pp("output.LayerNorm"))?,
            up: linear(hidden, inner, vb.pp("intermediate.dense"))?,
            down: linear(inner, hidden, vb.pp("output.dense"))?,
            down_norm: layer_norm(hidden, eps, vb.pp("output.LayerNorm"))?,
            heads: config.num_attention_heads,
        })
    }

    fn forward(&self, x: &Tensor, texts: &Packed) -> Result<Tensor> {
        let (tokens, hidden) = x.dims2()?;
        let head_dim = hidden / self.heads;
        let heads = |x: Tensor| x.reshape((tokens, self.heads, head_dim));
        let (q, k, v) =
            (heads(self.query.forward(x)?)?, heads(self.key.forward(x)?)?, heads(self.value.forward(x)?)?);
        let (cu, longest, scale) = (&texts.cu_seqlens, texts.longest, 1.0 / (head_dim as f32).sqrt());
        let attended = flash_attn_varlen(&q, &k, &v, cu, cu, longest, longest, scale, false)?;
        let attended = self.output.forward(&attended.reshape((tokens, hidden))?)?;
        let x = self.output_norm.forward(&(attended + x)?)?;
        let inner = self.up.forward(&x)?.gelu_erf()?;
        self.down_norm.forward(&(self.down.forward(&inner)? + x)?)
    }
}

/// The encoder.
pub struct Bert {
    words: Embedding,
    positions: Embedding,
    /// The row of the token types that texts have.
    token_type: Tensor,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

impl Bert {
    /// Loads the tensors that the models of candle-transformers read.
    pub fn load(vb: &VarBuilder, config: &Config) -> Result<Self> {
        let (from, hidden) = (vb.pp("embeddings"), config.hidden_size);
        let types = embedding(config.type_vocab_size, hidden, from.pp("token_type_embeddings"))?;
        let layer = |n| Layer::load(&vb.pp(format!("encoder.layer.{n}")), config);
        Ok(Self {
            words: embedding(config.vocab_size, hidden, from.pp("word_embeddings"))?,
            positions: embedding(config.max_position_embeddings, hidden, from.pp("position_embeddings"))?,
            token_type: types.embeddings().get(0)?,
            norm: layer_norm(hidden, config.layer_norm_eps, from.pp("LayerNorm"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?,
        })
    }

    /// Hidden states `(tokens, hidden)` of the last layer.
    pub fn forward(&self, texts: &Packed) -> Result<Tensor> {
        let x = (self.words.forward(&texts.ids)? + self.positions.forward(&texts.positions)?)?;
        let x = self.norm.forward(&x.broadcast_add(&self.token_type)?)?;
        self.layers.iter().try_fold(x, |x, layer| layer.forward(&x, texts))
    }
}
