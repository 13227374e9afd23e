// Causal attention by a kernel that `flashtile kernels export` wrote. The host reads the manifest and the source, and nothing of Rust:
//
//     flashtile kernels export kernels prefill --head-dim 64 --dtype f32 --target metal
//     xcrun swiftc -O examples/metal.swift -o attend && ./attend kernels

import Foundation
import Metal

/// The fields of manifest.json that this program reads.
struct Manifest: Decodable {
    struct Structure: Decodable {
        struct Field: Decodable {
            let name, type: String
            let offset: Int
        }
        let name: String
        let bytes: Int
        let fields: [Field]

        /// Bytes with these values at their fields, and zeros at the others.
        func filled(_ values: [String: [UInt64]]) -> [UInt8] {
            var bytes = [UInt8](repeating: 0, count: self.bytes)
            for field in fields {
                let size = field.type == "u64" ? 8 : 4
                for (n, value) in (values[field.name] ?? []).enumerated() {
                    for byte in 0..<size {
                        bytes[field.offset + n * size + byte] = UInt8(truncatingIfNeeded: value >> UInt64(8 * byte))
                    }
                }
            }
            return bytes
        }
    }
    struct Binding: Decodable {
        let index: Int
        let name, kind, type: String
    }
    struct Constant: Decodable {
        let index: Int
        let name, type: String
    }
    /// A team has 16 query rows for each of its row tiles.
    struct Generics: Decodable {
        let ROW_TILES, SIMD_GROUPS, TEAM_SIMDS: Int
    }
    struct Instance: Decodable {
        let entry, source: String
        let threads: Int
        let generics: Generics
        let bindings: [Binding]
        let function_constants: [Constant]
    }
    let structs: [Structure]
    let instances: [Instance]
}

let folder = URL(fileURLWithPath: CommandLine.arguments[1])
let json = try Data(contentsOf: folder.appendingPathComponent("manifest.json"))
let manifest = try JSONDecoder().decode(Manifest.self, from: json)
let instance = manifest.instances[0]
let device = MTLCreateSystemDefaultDevice()!

// One sequence: elements [heads, tokens, dim] of f32.
let (heads, tokens, dim) = (8, 500, 64)
let generics = instance.generics
let rows = 16 * generics.ROW_TILES * generics.SIMD_GROUPS / generics.TEAM_SIMDS
let tiles = (tokens + rows - 1) / rows

// Conditions of the kernel are in the manifest: this one says that rows begin at multiples of 16 bytes.
let values = MTLFunctionConstantValues()
for constant in instance.function_constants {
    var number: UInt32 = constant.name == "row_align" ? 16 : 0
    values.setConstantValue(&number, type: constant.type == "bool" ? .bool : .uint, index: constant.index)
}
let options = MTLCompileOptions()
options.languageVersion = .version3_1
// Infinities and NaN keep their meaning; `mathMode = .safe` from macOS 15 on.
options.fastMathEnabled = false
let source = try String(contentsOf: folder.appendingPathComponent(instance.source), encoding: .utf8)
let library = try device.makeLibrary(source: source, options: options)
let function = try library.makeFunction(name: instance.entry, constantValues: values)
let pipeline = try device.makeComputePipelineState(function: function)
precondition(pipeline.threadExecutionWidth == 32 && pipeline.maxTotalThreadsPerThreadgroup >= instance.threads)

// Strides of batch entry, head and row, of q and out in elements, of k and v in bytes.
let strides = [heads * tokens * dim, tokens * dim, dim].map { UInt64($0) }
let size = UInt64(tokens)
let scale = Float(1.442695) / Float(dim).squareRoot()
let structures: [String: [String: [UInt64]]] = [
    "Attend": [
        "q": strides, "k": strides.map { 4 * $0 }, "v": strides.map { 4 * $0 }, "q_heads": [UInt64(heads)], "group": [1],
        "page": [size], "width": [1], "tiles": [UInt64(tiles)], "queries": [size], "batches": [1],
        // Causal: keys to the left without a bound, none to the right.
        "left": [UInt64(Int32.max)], "right": [0], "scale": [UInt64(scale.bitPattern)],
    ],
    "Merge": ["out": strides, "q_heads": [UInt64(heads)], "queries": [size], "splits": [1], "simds": [1]],
]
let buffer = { (bytes: Int) -> any MTLBuffer in device.makeBuffer(length: bytes, options: .storageModeShared)! }
let tensor = 4 * heads * tokens * dim
let buffers = ["q": buffer(tensor), "k": buffer(tensor), "v": buffer(tensor), "out": buffer(tensor), "sequences": buffer(32)]
// Batch entry, first query row, query rows, page, first key, keys, position of the first query.
let sequence: [Int32] = [0, 0, Int32(tokens), 0, 0, Int32(tokens), 0, 0]
buffers["sequences"]!.contents().copyMemory(from: sequence, byteCount: 32)
for name in ["q", "k", "v"] {
    let elements = (0..<heads * tokens * dim).map { _ in Float.random(in: -1...1) }
    buffers[name]!.contents().copyMemory(from: elements, byteCount: tensor)
}

let commands = device.makeCommandQueue()!.makeCommandBuffer()!
let encoder = commands.makeComputeCommandEncoder()!
encoder.setComputePipelineState(pipeline)
let absent = buffer(16)
for binding in instance.bindings {
    if binding.kind == "struct" {
        let bytes = manifest.structs.first { $0.name == binding.type }!.filled(structures[binding.type]!)
        encoder.setBytes(bytes, length: bytes.count, index: binding.index)
    } else {
        // Inputs that the constants leave out are bound all the same.
        encoder.setBuffer(buffers[binding.name] ?? absent, offset: 0, index: binding.index)
    }
}
// Key/value heads times tiles of query rows, splits, sequences.
encoder.dispatchThreadgroups(
    MTLSize(width: heads * tiles, height: 1, depth: 1),
    threadsPerThreadgroup: MTLSize(width: instance.threads, height: 1, depth: 1))
encoder.endEncoding()
commands.commit()
commands.waitUntilCompleted()
if let error = commands.error { throw error }
// The first query sees the first key alone: its answer is that key's value.
let (out, v) = (buffers["out"]!.contents(), buffers["v"]!.contents())
print("out begins with \(out.load(as: Float.self)), v with \(v.load(as: Float.self))")
