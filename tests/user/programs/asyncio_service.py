"""A small service: prices come from a (slow) web API, orders with prices go out. Ends on SIGTERM like any service."""

import asyncio
import json
import signal
import sys

import semel

PRICES = {"tea": 3, "coffee": 5, "milk": 1, "bread": 4, "salt": 2}


async def look_up(product: str) -> int:
    await asyncio.sleep(0.001)  # the web API
    return PRICES[product]


async def serve(bootstrap: str) -> None:
    async with semel.Session(
        bootstrap=bootstrap, group="pricing", topics=["orders"], name="pricing", transaction_records_max=200
    ) as session:
        async for transaction in session:
            orders = [json.loads(row.value) for row in transaction.rows()]
            prices = await asyncio.gather(*(look_up(order["product"]) for order in orders))
            for order, price in zip(orders, prices, strict=True):
                order["price"] = price * order["amount"]
                transaction.send("priced", json.dumps(order).encode(), key=order["customer"].encode())


async def main() -> None:
    service = asyncio.create_task(serve(sys.argv[1]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.cancel)
    try:
        await service
    except asyncio.CancelledError:
        print("bye")


asyncio.run(main())
