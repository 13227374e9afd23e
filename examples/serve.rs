//! A small serving loop over a KV cache: requests are admitted, their prompts are prefilled in chunks while others
//! decode, one is forked, one is rolled back, one is evicted and brought back.
//!
//! The model is synthetic (random weights, two layers), its attention is real. After each step, the logits of every
//! request are recomputed from scratch over plain tensors without a cache. They must be the same bit for bit, because
//! a row's result depends only on its own query, keys and values.
//!
//! `cargo run --release --example serve`

#![allow(clippy::print_stdout, reason = "an example reports by printing")]

use flashtile::{
    Attention, CacheDesc, CacheLayout, CacheShape, Codec, KvCache, KvCacheExt, SeqId, TensorView,
    TensorViewMut, attention,
};

type Error = Box<dyn std::error::Error>;

const LAYERS: usize = 2;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const WIDTH: usize = Q_HEADS * DIM;
const VOCABULARY: usize = 97;
/// Prompt tokens per step.
const CHUNK: usize = 24;

/// The matrix element with a given index, in -1..1.
fn random(matrix: usize, at: usize) -> f32 {
    let x = (matrix as u64 * 0x9E37_79B9 + at as u64 + 1).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 31)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// `[inputs, outputs]`, row-major.
struct Matrix {
    weights: Vec<f32>,
    outputs: usize,
}

impl Matrix {
    fn new(index: usize, inputs: usize, outputs: usize) -> Self {
        let scale = 1.7 / (inputs as f32).sqrt();
        Self { weights: (0..inputs * outputs).map(|at| scale * random(index, at)).collect(), outputs }
    }

    /// Multiplies each row by the matrix; a row's result depends only on that row.
    fn apply(&self, rows: &[f32], inputs: usize) -> Vec<f32> {
        let mut result = vec![0.0; rows.len() / inputs * self.outputs];
        for (row, out) in rows.chunks_exact(inputs).zip(result.chunks_exact_mut(self.outputs)) {
            for (x, weights) in row.iter().zip(self.weights.chunks_exact(self.outputs)) {
                for (out, w) in out.iter_mut().zip(weights) {
                    *out += x * w;
                }
            }
        }
        result
    }
}

struct Layer {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
}

struct Model {
    layers: Vec<Layer>,
    head: Matrix,
}

/// Rows `[tokens, heads, DIM]` as a view.
fn packed(rows: &[f32], heads: usize) -> flashtile::Result<TensorView<'_>> {
    Ok(TensorView::packed(rows, [rows.len() / (heads * DIM), heads, DIM])?)
}

/// Rows `[tokens, Q_HEADS, DIM]` to be written.
fn packed_mut(rows: &mut [f32]) -> flashtile::Result<TensorViewMut<'_>> {
    let tokens = rows.len() / WIDTH;
    Ok(TensorViewMut::packed(rows, [tokens, Q_HEADS, DIM])?)
}

/// Normalises rows, so that layers neither grow nor vanish.
fn normalise(rows: &[f32]) -> Vec<f32> {
    let mut result = rows.to_vec();
    for row in result.chunks_exact_mut(WIDTH) {
        let scale = (row.iter().map(|x| x * x).sum::<f32>() / WIDTH as f32).sqrt().recip();
        row.iter_mut().for_each(|x| *x *= scale);
    }
    result
}

impl Model {
    fn new() -> Self {
        let layer = |n: usize| Layer {
            q: Matrix::new(4 * n, WIDTH, WIDTH),
            k: Matrix::new(4 * n + 1, WIDTH, KV_HEADS * DIM),
            v: Matrix::new(4 * n + 2, WIDTH, KV_HEADS * DIM),
            o: Matrix::new(4 * n + 3, WIDTH, WIDTH),
        };
        let head = Matrix::new(100, WIDTH, VOCABULARY);
        Self { layers: (0..LAYERS).map(layer).collect(), head }
    }

    /// Logits after each token, `[tokens, VOCABULARY]`. `attend(layer, q, k, v)` gives the attention of packed rows.
    fn forward(
        &self,
        tokens: &[usize],
        mut attend: impl FnMut(usize, &[f32], &[f32], &[f32]) -> flashtile::Result<Vec<f32>>,
    ) -> Result<Vec<f32>, Error> {
        let mut x: Vec<f32> =
            tokens.iter().flat_map(|t| (0..WIDTH).map(move |d| random(200, t * WIDTH + d))).collect();
        for (n, layer) in self.layers.iter().enumerate() {
            let normal = normalise(&x);
            let [q, k, v] = [&layer.q, &layer.k, &layer.v].map(|matrix| matrix.apply(&normal, WIDTH));
            let out = layer.o.apply(&attend(n, &q, &k, &v)?, WIDTH);
            x.iter_mut().zip(out).for_each(|(x, out)| *x += out);
        }
        Ok(self.head.apply(&normalise(&x), WIDTH))
    }

    /// One step of a batch: new tokens for each sequence. Returns the logits after the last token of each.
    fn step(&self, cache: &mut KvCache, batch: &[(SeqId, &[usize])]) -> Result<Vec<Vec<f32>>, Error> {
        let tokens: Vec<usize> = batch.iter().flat_map(|(_, tokens)| tokens.iter().copied()).collect();
        let new: Vec<(SeqId, usize)> = batch.iter().map(|(seq, tokens)| (*seq, tokens.len())).collect();
        let mut step = cache.step(&new)?;
        let logits = self.forward(&tokens, |layer, q, k, v| {
            let mut out = vec![0.0; q.len()];
            let [k, v] = [packed(k, KV_HEADS)?, packed(v, KV_HEADS)?];
            step.attend(layer, packed(q, Q_HEADS)?, k, v, &mut packed_mut(&mut out)?)?;
            Ok(out)
        })?;
        step.finish()?;
        let mut end = 0;
        let last = |(_, tokens): &(SeqId, &[usize])| {
            end += tokens.len();
            logits[(end - 1) * VOCABULARY..end * VOCABULARY].to_vec()
        };
        Ok(batch.iter().map(last).collect())
    }

    /// Logits after the last token, without a cache.
    fn recompute(&self, tokens: &[usize]) -> Result<Vec<f32>, Error> {
        let logits = self.forward(tokens, |_, q, k, v| {
            let mut out = vec![0.0; q.len()];
            let [k, v] = [packed(k, KV_HEADS)?, packed(v, KV_HEADS)?];
            attention(packed(q, Q_HEADS)?, k, v, &mut packed_mut(&mut out)?, &Attention::causal())?;
            Ok(out)
        })?;
        Ok(logits[(tokens.len() - 1) * VOCABULARY..].to_vec())
    }
}

fn best(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0)
}

struct Request {
    seq: SeqId,
    tokens: Vec<usize>,
    /// Tokens in the cache.
    done: usize,
}

struct Server {
    model: Model,
    cache: KvCache,
    requests: Vec<Request>,
    checked: usize,
}

impl Server {
    fn admit(&mut self, prompt: Vec<usize>) -> Result<(), Error> {
        self.requests.push(Request { seq: self.cache.create()?, tokens: prompt, done: 0 });
        Ok(())
    }

    /// Prefills a chunk of each unread prompt and decodes one token for each other request.
    fn step(&mut self) -> Result<(), Error> {
        let batch: Vec<(SeqId, &[usize])> = self
            .requests
            .iter()
            .map(|r| (r.seq, &r.tokens[r.done..r.tokens.len().min(r.done + CHUNK)]))
            .collect();
        let logits = self.model.step(&mut self.cache, &batch)?;
        for (request, logits) in self.requests.iter_mut().zip(logits) {
            request.done = self.cache.len(request.seq)?;
            let expected = self.model.recompute(&request.tokens[..request.done])?;
            if logits.iter().zip(&expected).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Err(format!("{} differs after {} tokens", request.seq, request.done).into());
            }
            self.checked += 1;
            if request.done == request.tokens.len() {
                request.tokens.push(best(&logits));
            }
        }
        Ok(())
    }
}

fn prompt(seed: usize, len: usize) -> Vec<usize> {
    (0..len).map(|at| (random(300 + seed, at).abs() * VOCABULARY as f32) as usize % VOCABULARY).collect()
}

fn main() -> Result<(), Error> {
    let layout = CacheLayout::Paged { pages: 64, page_size: 16 };
    let shape = CacheShape { layers: LAYERS, kv_heads: KV_HEADS, head_dim: DIM, value_dim: DIM };
    let cache = KvCache::new(CacheDesc::new(layout, shape, Codec::F32))?;
    let mut server = Server { model: Model::new(), cache, requests: Vec::new(), checked: 0 };
    for step in 0..24 {
        match step {
            0 => {
                server.admit(prompt(0, 61))?;
                server.admit(prompt(1, 5))?;
            }
            4 => server.admit(prompt(2, 90))?,
            // Two answers to one prompt, whose pages they share.
            10 => {
                let parent = &server.requests[0];
                let mut tokens = parent.tokens.clone();
                if let Some(last) = tokens.last_mut() {
                    *last = (*last + 1) % VOCABULARY;
                }
                let fork = Request { seq: server.cache.fork(parent.seq)?, tokens, done: parent.done };
                server.requests.push(fork);
            }
            // The last three tokens are rolled back, and another one follows.
            14 => {
                let request = &mut server.requests[1];
                request.done -= 3;
                server.cache.truncate(request.seq, request.done)?;
                request.tokens.truncate(request.done);
                request.tokens.push(7);
            }
            // Evicted, then prefilled again in chunks.
            17 => {
                let mut request = server.requests.remove(2);
                server.cache.remove(request.seq)?;
                (request.seq, request.done) = (server.cache.create()?, 0);
                server.requests.push(request);
            }
            _ => {}
        }
        server.step()?;
        let memory = server.cache.memory();
        println!(
            "step {step:2}: {} requests, {} tokens in {} pages, {} of them shared",
            memory.sequences,
            memory.tokens,
            memory.pages - memory.pages_free,
            memory.pages_shared
        );
    }
    println!("{} results, each with the bits of a run from scratch", server.checked);
    Ok(())
}
