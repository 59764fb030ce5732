// Records the JSON schemas that zod 4, zod-to-json-schema (zod 3) and openai's helpers write for usual types.
// npm install zod@4.6.7 zod3@npm:zod@3.25.76 zod-to-json-schema@3.25.2 openai@6.49.0
// node tests/outside/record_schemas.mjs > schemas.json, then record_schemas.py adds LangChain's and pydantic's
import { z } from "zod"
import { z as z3 } from "zod3"
import { zodToJsonSchema } from "zod-to-json-schema"
import { zodResponseFormat, zodFunction } from "openai/helpers/zod"

const types = z => ({
  "object": z.object({ name: z.string().describe("a name"), age: z.number().int().min(0).max(120), tags: z.array(z.string()).max(3) }),
  "optional, nullable, default": z.object({ a: z.string().optional(), b: z.number().nullable(), c: z.boolean().default(true) }),
  "enum, literal, union": z.object({ kind: z.enum(["x", "y"]), one: z.literal(1), both: z.union([z.string(), z.number()]) }),
  "discriminated union": z.discriminatedUnion("type", [
    z.object({ type: z.literal("circle"), radius: z.number().positive() }), z.object({ type: z.literal("box"), side: z.number().lt(9) })]),
  "formats": z.object({ mail: z.string().email(), day: z.string().datetime(), id: z.string().uuid(), site: z.string().url() }),
  "lengths and patterns": z.object({ code: z.string().regex(/^[A-Z]{2}\d{3}$/), short: z.string().min(1).max(5), even: z.number().multipleOf(2) }),
  "record, tuple": z.object({ counts: z.record(z.string(), z.number()), pair: z.tuple([z.string(), z.number()]) }),
  "strict": z.object({ a: z.string() }).strict(),
  "nested": z.object({ people: z.array(z.object({ name: z.string(), address: z.object({ city: z.string() }) })).min(1).max(2) }),
  "intersection": z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  "set": z.object({ unique: z.array(z.string()) }),
})
const schemas = {}
for (const [name, type] of Object.entries(types(z))) {
  schemas[`zod 4: ${name}`] = z.toJSONSchema(type)
  schemas[`zod 4, draft 7: ${name}`] = z.toJSONSchema(type, { target: "draft-7" })
}
for (const [name, type] of Object.entries(types(z3))) schemas[`zod-to-json-schema: ${name}`] = zodToJsonSchema(type)
schemas["zod-to-json-schema: set"] = zodToJsonSchema(z3.object({ unique: z3.set(z3.string()) }))
const tree = z.object({ value: z.number(), get children() { return z.array(tree).max(1) } })
schemas["zod 4: recursive"] = z.toJSONSchema(tree)
schemas["openai: zodResponseFormat"] = zodResponseFormat(types(z)["nested"], "people").json_schema.schema
schemas["openai: zodFunction"] = zodFunction({ name: "f", parameters: types(z)["object"] }).function.parameters
console.log(JSON.stringify(schemas))
